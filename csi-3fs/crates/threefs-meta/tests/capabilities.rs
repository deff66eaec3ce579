//! Capabilities of a ticket holder for the storage services: they cover the reserved bytes.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod calls;

use std::sync::Arc;
use std::time::Duration;

use fabric::auth::Key;
use fabric::auth::capability::Capability;
use fabric::auth::keys::KeyRing;
use fabric::auth::ticket::{SealedTicket, Ticket};
use fabric::deadline::Deadline;
use fabric::rpc::Shutdown;
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClientId, Incarnation, InodeId, NodeId};
use threefs_core::terms::FileTerms;
use threefs_meta::{
    At, Identity, Inode, InodeKind, Meta, MetaChange, MetaClient, MetaConfig, MetaQuery, MetaReply,
    NoChunks, RequestId, Reservation, SessionId, TreeConfig,
};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, Timers};

use calls::Calls;

const MIB: u64 = 1 << 20;

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The ticket of a volume.
fn ticket(directory: InodeId) -> SealedTicket {
    let ticket = Ticket {
        cluster: "default".into(),
        key_id: 0,
        directory: directory.0,
        path: "/v".into(),
        read_only: false,
        node: String::new(),
        expires_unix_s: u64::MAX,
    };
    ticket.seal(&KeyRing::of(key())).unwrap()
}

/// The permitted end, and the truncate version.
fn reserve(file: &Inode, end: u64, truncate_version: u64) -> MetaChange {
    let (inode, session) = (file.id, SessionId(1));
    let reservation = Reservation { inode, session, end, truncate_version };
    MetaChange::Reserve { reservations: vec![reservation] }
}

#[tokio::test]
async fn a_reservation_comes_with_the_capability_to_use_it() {
    let folder = tempfile::tempdir().unwrap();
    let (_handle, shutdown) = Shutdown::new();
    let mgmtd = Mgmtd::open(MgmtdConfig {
        listen: "127.0.0.1:0".into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_meta::StoreConfig::folder(folder.path().join("mgmtd")),
        bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 },
        rebalance: true,
        timers: Timers { scan_ms: 5, ..Timers::one_machine() },
    });
    let mgmtd = mgmtd.await.unwrap();
    let addresses = vec![mgmtd.address().to_string()];
    let meta = Meta::open(
        MetaConfig {
            listen: "127.0.0.1:0".into(),
            key: key().into(),
            tls: fabric::tls::ServiceTls::default(),
            store: threefs_meta::StoreConfig::folder(folder.path().join("meta")),
            mgmtd: addresses.clone(),
            tree: TreeConfig::default(),
        },
        Arc::new(NoChunks),
    );
    let meta = meta.await.unwrap();
    let address = meta.address().to_string();
    tokio::spawn(mgmtd.serve(shutdown.clone()));
    tokio::spawn(meta.serve(shutdown));
    let heartbeat = Heartbeat {
        node: NodeId(1),
        address: "127.0.0.1:1".into(),
        incarnation: Incarnation(1),
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    };
    MgmtdClient::new(&addresses, &key()).heartbeat(heartbeat, soon()).await.unwrap();

    let control = MetaClient::new(std::slice::from_ref(&address), &key(), ClientId(1));
    let volume = control.make_directory(At::path("/v"), false, soon()).await.unwrap();
    let (bytes_max, inodes_max) = (Some(100 * MIB), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    control.change(quota, soon()).await.unwrap();
    let sealed = ticket(volume.id);
    let tenant = MetaClient::new(std::slice::from_ref(&address), &sealed, ClientId(2));
    let (file, session) = tenant.create(At::path("/file"), true, soon()).await.unwrap();
    let InodeKind::File { layout, .. } = &file.kind else { panic!("{file:?}") };
    assert_eq!(u64::from(layout.chunk_bytes), MIB);
    let terms_of = |capability: &Capability| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let (ring, ticket) = (KeyRing::of(key()), sealed.ticket());
        capability.check(&ring, ticket, file.id.0, true, now.as_secs()).unwrap();
        let terms = FileTerms::decode(capability.terms()).unwrap();
        assert_eq!(&terms.layout, layout);
        terms.end
    };
    let query_terms = async |client: &MetaClient| {
        let inodes = vec![file.id, volume.id, InodeId(1 << 40)];
        match client.query(MetaQuery::Capabilities { inodes }, soon()).await.unwrap() {
            MetaReply::Capabilities(signed) => {
                assert!(
                    signed[1..] == [None, None],
                    "directories and missing inodes have no chunks"
                );
                terms_of(signed[0].as_ref().unwrap())
            }
            other => panic!("{other:?}"),
        }
    };
    let reserved = async |end, truncate_version| {
        let change = reserve(&file, end, truncate_version);
        match tenant.change(change, soon()).await.unwrap() {
            MetaReply::Reserved { inodes, capabilities } => {
                assert!(matches!(inodes[..], [Ok(_)]), "{inodes:?}");
                terms_of(capabilities[0].as_ref().unwrap())
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(query_terms(&tenant).await, 0, "nothing is reserved");
    assert_eq!(reserved(5 * MIB + 1, 0).await, 5 * MIB + 1);
    assert_eq!(query_terms(&tenant).await, 5 * MIB + 1);
    // Nothing beyond the quota.
    let result = tenant.change(reserve(&file, 101 * MIB, 0), soon()).await;
    assert!(result.is_err(), "{result:?}");
    assert_eq!(query_terms(&tenant).await, 5 * MIB + 1);
    // A reservation for an earlier truncate version is void.
    tenant.set_length(At::path("/file"), 0, soon()).await.unwrap();
    assert_eq!(reserved(9 * MIB, 0).await, 0);
    assert_eq!(query_terms(&tenant).await, 0);
    assert_eq!(reserved(2 * MIB, 1).await, 2 * MIB);
    tenant.set_length(At::path("/file"), 8 * MIB, soon()).await.unwrap();
    assert_eq!(query_terms(&tenant).await, 8 * MIB);
    // The end of the last session removes the reservation from new capabilities. An eighth of the
    // limit is released at once, the rest when the earlier capabilities have expired.
    let used = async || match control.query(MetaQuery::Quotas { at: At::path("/v") }, soon()).await
    {
        Ok(MetaReply::Quotas(quotas)) => quotas[0].bytes_used,
        other => panic!("{other:?}"),
    };
    let id = RequestId { client: ClientId(3), sequence: 1, finished_below: 0 };
    let attempt = async || {
        let change = reserve(&file, 50 * MIB, 1);
        match tenant.change_with(id, &Identity::ROOT, change, soon()).await.unwrap() {
            MetaReply::Reserved { capabilities, .. } => terms_of(capabilities[0].as_ref().unwrap()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((attempt().await, used().await), (50 * MIB, 50 * MIB));
    let ends = vec![(file.id, SessionId(1)), (file.id, session.unwrap())];
    let change = MetaChange::ReportLengths { reports: Vec::new(), ends };
    tenant.change(change, soon()).await.unwrap();
    assert_eq!((query_terms(&tenant).await, used().await), (8 * MIB, 50 * MIB - 100 * MIB / 8));
    // A retry of the reservation gets the current one.
    assert_eq!(attempt().await, 8 * MIB);
    // A file from outside all quotas, where writers do not reserve, has its length.
    let (outside, _) = control.create(At::path("/outside"), true, soon()).await.unwrap();
    control.rename(At::path("/outside"), At::path("/v/inside"), soon()).await.unwrap();
    let query = MetaQuery::Capabilities { inodes: vec![outside.id] };
    let MetaReply::Capabilities(signed) = tenant.query(query, soon()).await.unwrap() else {
        panic!()
    };
    let terms = FileTerms::decode(signed[0].as_ref().unwrap().terms()).unwrap();
    assert_eq!(terms.end, 0);
    // Clients with the cluster key need none.
    let reply = control.change(reserve(&file, MIB, 1), soon()).await.unwrap();
    assert!(matches!(reply, MetaReply::Inodes(_)), "{reply:?}");
}
