//! Tests of a volume's credential at mgmtd and the storage services, used by a malicious client
//! that implements the protocol itself.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fabric::auth::Key;
use fabric::auth::capability::{Capability, Presented};
use fabric::auth::keys::KeyRing;
use fabric::auth::ticket::{SealedTicket, Ticket};
use fabric::deadline::Deadline;
use fabric::rpc::{
    CallOptions, Connection, ConnectionConfig, FaultCode, Payload, Reply, RpcError, encode,
};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::ContentChange;
use threefs_core::fence::VolumeEpoch;
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, Epoch, Incarnation, InodeId, NodeId, RequestTag,
    RoutingVersion, TableId, TableVersion, TargetId, TreeId,
};
use threefs_core::layout::{ChainChoice, Layout};
use threefs_core::message::{
    Address, QueryChunks, QueryLastChunk, ReadMany, ReadPart, ReadRequest, RepairRequest,
    StorageRequest, SyncStart, UpdateRequest,
};
use threefs_core::snapshot_inode;
use threefs_core::terms::FileTerms;
use threefs_mgmtd::protocol::MgmtdRequest;
use threefs_mgmtd::{Claim, MetaRegistration, MgmtdClient};

use crate::cluster_test::{Cluster, whole};

const VOLUME: u64 = 77;
const OWN: u64 = 42;
const FOREIGN: u64 = 43;

fn ring() -> KeyRing {
    KeyRing::of(Key::from_bytes(&[7; 32]).unwrap())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn ticket(directory: u64, read_only: bool) -> SealedTicket {
    let (cluster, path) = ("default".into(), "/volumes/a".into());
    let (node, expires_unix_s) = (String::new(), now() + 600);
    let ticket = Ticket { cluster, key_id: 0, directory, path, read_only, node, expires_unix_s };
    ticket.seal(&ring()).unwrap()
}

async fn open(address: &str, context: &str, ticket: &SealedTicket) -> Connection {
    let config = ConnectionConfig::new(context, ticket.clone());
    Connection::open(address, config, Deadline::after(Duration::from_secs(60))).await.unwrap()
}

async fn call(connection: &Connection, message: Bytes, class: u8) -> Result<Reply, RpcError> {
    let options = CallOptions { class, ..CallOptions::default() };
    let deadline = Deadline::after(Duration::from_secs(60));
    connection.call_with(message, Payload::empty(), deadline, options).await
}

/// All chunks on the first chain.
fn layout() -> Layout {
    Layout {
        table: TableId(1),
        table_version: TableVersion(1),
        chunk_bytes: 1 << 20,
        stripe: 1,
        chains: ChainChoice::Explicit(vec![ChainId(1)]),
    }
}

fn terms(end: u64, until_unix_s: u64) -> FileTerms {
    FileTerms { layout: layout(), end, until_unix_s, place: None }
}

/// The code of the fault; `None` if the service accepted the request.
fn code(result: Result<Reply, RpcError>) -> Option<FaultCode> {
    match result {
        Ok(_) => None,
        Err(RpcError::Faulted { fault, .. }) => Some(fault.code),
        Err(other) => panic!("{other}"),
    }
}

fn requests(inode: u64) -> Vec<StorageRequest> {
    let (target, inode) = (TargetId(1), InodeId(inode));
    let to = Address { chain: ChainId(1), chain_version: ChainVersion(1), target };
    let chunk = ChunkId::new(inode, 0);
    let part = ReadPart { index: 0, offset: 0, length: 1 };
    vec![
        StorageRequest::Read(ReadRequest { to, chunk, offset: 0, length: 1 }),
        StorageRequest::ReadMany(ReadMany { to, inode, parts: vec![part] }),
        StorageRequest::QueryChunks(QueryChunks { to, inode, after: None, limit: 1 }),
        StorageRequest::QueryLastChunk(QueryLastChunk { to, inode }),
        StorageRequest::Update(UpdateRequest {
            to,
            chunk,
            tag: RequestTag::default(),
            change: ContentChange::Remove,
            payload_checksum: Checksum::of(&[]),
            chunk_bytes: 1 << 20,
        }),
    ]
}

fn heartbeat() -> Heartbeat {
    let (address, incarnation) = ("10.0.0.1:9002".into(), Incarnation(1));
    let targets = Vec::new();
    let (node, data) = (NodeId(1), DataFolder::default());
    Heartbeat { node, address, incarnation, sequence: 1, targets, capacity_bytes: 0, data }
}

/// A metadata service with another tree, replacing the registered one.
fn adopted() -> MetaRegistration {
    let (tree, cluster) = (TreeId(9), None);
    MetaRegistration { tree, generation: 1, process: 1, cluster, claim: Claim::Adopted }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_reaches_its_own_files_and_nothing_else() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let manager = MgmtdClient::new(std::slice::from_ref(&cluster.mgmtd), &ticket(VOLUME, false));
    let deadline = Deadline::after(Duration::from_secs(60));
    let routing = manager.routing(RoutingVersion(0), Duration::ZERO, deadline).await;
    let routing = routing.unwrap().unwrap();
    let address = routing.address(NodeId(1)).unwrap().to_owned();

    let mgmtd =
        open(&cluster.mgmtd, threefs_mgmtd::protocol::CONTEXT, &ticket(VOLUME, false)).await;
    let current = RoutingVersion(0);
    let promote = MgmtdRequest::Promote { target: TargetId(1), apply: true };
    for (request, expected) in [
        (MgmtdRequest::Routing { known_version: current, wait_ms: 0 }, None),
        (MgmtdRequest::Status, None),
        (MgmtdRequest::Rebalance { apply: false, leaving: None }, Some(FaultCode::Forbidden)),
        (
            MgmtdRequest::Rebalance { apply: true, leaving: Some(vec![NodeId(1)]) },
            Some(FaultCode::Forbidden),
        ),
        (MgmtdRequest::Heartbeat(heartbeat()), Some(FaultCode::Forbidden)),
        (promote, Some(FaultCode::Forbidden)),
        (MgmtdRequest::RegisterMeta(adopted()), Some(FaultCode::Forbidden)),
    ] {
        let capability_for = format!("{request:?}");
        assert_eq!(
            code(call(&mgmtd, encode(&request).unwrap(), 0).await),
            expected,
            "{capability_for}"
        );
    }

    let sealed = ticket(VOLUME, false);
    let storage = open(&address, crate::config::STORAGE_CONTEXT, &sealed).await;
    let capability = |directory: u64, read_only: bool, inode: u64| {
        let sealed = ticket(directory, read_only);
        let terms = terms(1 << 20, now() + 60).encode().unwrap();
        Some(Capability::sign(&ring(), sealed.ticket(), inode, terms, now()))
    };
    let build_request = async |request: &StorageRequest, capability: Option<Capability>| {
        let capability_for = capability.map_or(Presented::Nothing, Presented::Capability);
        let message = encode(&(request, capability_for)).unwrap();
        code(call(&storage, message, request.class()).await)
    };
    for request in requests(OWN) {
        assert_eq!(
            build_request(&request, capability(VOLUME, false, OWN)).await,
            None,
            "{request:?}"
        );
        assert_eq!(build_request(&request, None).await, Some(FaultCode::Forbidden), "{request:?}");
        // Of another volume.
        let other = capability(VOLUME + 1, false, OWN);
        assert_eq!(build_request(&request, other).await, Some(FaultCode::Forbidden), "{request:?}");
        let reading = build_request(&request, capability(VOLUME, true, OWN)).await;
        let updates = matches!(request, StorageRequest::Update(_));
        assert_eq!(reading, updates.then_some(FaultCode::Forbidden), "{request:?}");
    }
    for request in requests(FOREIGN) {
        let own = capability(VOLUME, false, OWN);
        assert_eq!(build_request(&request, own).await, Some(FaultCode::Forbidden), "{request:?}");
    }
    let to = Address { chain: ChainId(1), chain_version: ChainVersion(1), target: TargetId(1) };
    let (from, chunk) = (TargetId(2), ChunkId::new(InodeId(OWN), 0));
    for request in [
        StorageRequest::Repair(RepairRequest { to, from, chunk, version: ChunkVersion(1) }),
        StorageRequest::SyncStart(SyncStart { to, from, round: 1 }),
    ] {
        let own = capability(VOLUME, false, OWN);
        assert_eq!(build_request(&request, own).await, Some(FaultCode::Forbidden), "{request:?}");
    }

    // A read-only ticket with a capability that allows writes, which no service would sign for it.
    let reader = open(&address, crate::config::STORAGE_CONTEXT, &ticket(VOLUME, true)).await;
    let update = requests(OWN).pop().unwrap();
    let own = capability(VOLUME, false, OWN).map_or(Presented::Nothing, Presented::Capability);
    let message = encode(&(&update, own)).unwrap();
    let fault_code = code(call(&reader, message, update.class()).await);
    assert_eq!(fault_code, Some(FaultCode::Forbidden));
}

/// A ticket holder writes chunks of its file on a chain or at an index outside the file's layout:
/// no quota would count them, and removing the file would not remove them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_outside_the_layout_of_a_file_are_rejected() {
    let cluster = Cluster::of_three(64 << 20).await;
    whole(&cluster.client()).await;
    let manager = MgmtdClient::new(std::slice::from_ref(&cluster.mgmtd), &ticket(VOLUME, false));
    let deadline = Deadline::after(Duration::from_secs(60));
    let routing = manager.routing(RoutingVersion(0), Duration::ZERO, deadline).await;
    let routing = routing.unwrap().unwrap();
    let sealed = ticket(VOLUME, false);
    let of_terms = |terms: &FileTerms| {
        let terms = terms.encode().unwrap();
        Capability::sign(&ring(), sealed.ticket(), OWN, terms, now())
    };
    let capability = of_terms(&terms((2 << 20) + 1, now() + 60));
    let write = async |chain: u32, index: u32, chunk_bytes: u32, capability: &Capability| {
        let current = routing.chain(ChainId(chain)).unwrap();
        let head = current.head().unwrap();
        let address = routing.address(head.node).unwrap().to_owned();
        let storage = open(&address, crate::config::STORAGE_CONTEXT, &sealed).await;
        let to = Address { chain: current.id, chain_version: current.version, target: head.target };
        let update = UpdateRequest {
            to,
            chunk: ChunkId::new(InodeId(OWN), index),
            tag: RequestTag::default(),
            change: ContentChange::Remove,
            payload_checksum: Checksum::of(&[]),
            chunk_bytes,
        };
        let request = StorageRequest::Update(update);
        let message = encode(&(&request, Presented::Capability(capability.clone()))).unwrap();
        code(call(&storage, message, request.class()).await)
    };
    let other = routing.chains.keys().find(|chain| **chain != ChainId(1)).unwrap().0;
    assert_eq!(write(1, 0, 1 << 20, &capability).await, None);
    assert_eq!(write(1, 2, 1 << 20, &capability).await, None);
    assert_eq!(write(other, 0, 1 << 20, &capability).await, Some(FaultCode::Forbidden));
    assert_eq!(write(1, 0, 64 << 20, &capability).await, Some(FaultCode::Forbidden));
    // It may have been reserved meanwhile: a new capability may permit more.
    for index in [3, u32::MAX] {
        assert_eq!(write(1, index, 1 << 20, &capability).await, Some(FaultCode::Expired));
    }
    let late = of_terms(&terms(2 << 20, now()));
    assert_eq!(write(1, 0, 1 << 20, &late).await, Some(FaultCode::Expired));
    let none = Capability::sign(&ring(), sealed.ticket(), OWN, Vec::new(), now());
    assert_eq!(write(1, 0, 1 << 20, &none).await, Some(FaultCode::BadRequest));
}

/// Of a file of a snapshot, a volume reads the epoch of the snapshot; its capability for the file itself
/// gives no right to any epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_reads_a_file_of_a_snapshot_in_its_epoch_and_does_nothing_else() {
    let cluster = Cluster::of_three(64 << 20).await;
    whole(&cluster.client()).await;
    let manager = MgmtdClient::new(std::slice::from_ref(&cluster.mgmtd), &ticket(VOLUME, false));
    let deadline = Deadline::after(Duration::from_secs(60));
    let routing = manager.routing(RoutingVersion(0), Duration::ZERO, deadline).await;
    let address = routing.unwrap().unwrap().address(NodeId(1)).unwrap().to_owned();
    let sealed = ticket(VOLUME, false);
    let storage = open(&address, crate::config::STORAGE_CONTEXT, &sealed).await;
    let shown = Epoch::new(3, 5);
    let capability = |inode: InodeId, place: Option<VolumeEpoch>| {
        // More than the metadata service would permit.
        let terms = FileTerms { place, ..terms(1 << 20, now() + 60) }.encode().unwrap();
        Capability::sign(&ring(), sealed.ticket(), inode.0, terms, now())
    };
    let ask = async |request: &StorageRequest, capability: Capability| {
        let message = encode(&(request, Presented::Capability(capability))).unwrap();
        code(call(&storage, message, request.class()).await)
    };
    let to = Address { chain: ChainId(1), chain_version: ChainVersion(1), target: TargetId(1) };
    let read = |inode: InodeId, epoch: Epoch| {
        let chunk = ChunkId::new(inode, 0).in_epoch(epoch);
        StorageRequest::ReadUpTo(ReadRequest { to, chunk, offset: 0, length: 1 })
    };
    let own = InodeId(OWN);
    let in_snapshot = snapshot_inode::join(1, own);
    let place = Some(VolumeEpoch { volume: Some(InodeId(VOLUME)), epoch: shown });
    assert_eq!(ask(&read(in_snapshot, shown), capability(in_snapshot, place)).await, None);
    for (inode, epoch, capability) in [
        (in_snapshot, Epoch::new(3, 4), capability(in_snapshot, place)),
        (in_snapshot, Epoch::new(3, 6), capability(in_snapshot, place)),
        (in_snapshot, Epoch::new(4, 5), capability(in_snapshot, place)),
        (in_snapshot, Epoch::MAX, capability(in_snapshot, place)),
        (in_snapshot, Epoch::default(), capability(in_snapshot, None)),
        (in_snapshot, shown, capability(own, place)),
        // The file as its other snapshot shows it, another file, and the file itself.
        (snapshot_inode::join(2, own), shown, capability(in_snapshot, place)),
        (snapshot_inode::join(1, InodeId(FOREIGN)), shown, capability(in_snapshot, place)),
        (own, shown, capability(in_snapshot, place)),
        (own, shown, capability(own, place)),
    ] {
        let refused = ask(&read(inode, epoch), capability).await;
        assert_eq!(refused, Some(FaultCode::Forbidden), "{inode} {epoch}");
    }
    // Requests for the file itself, and updates and lists of chunks that no file has.
    for request in requests(OWN).iter().chain(&requests(in_snapshot.0)) {
        let refused = ask(request, capability(in_snapshot, place)).await;
        assert_eq!(refused, Some(FaultCode::Forbidden), "{request:?}");
    }
}
