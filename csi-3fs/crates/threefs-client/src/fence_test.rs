//! Fences of volumes with real services: no update of an ended epoch is made once a fence is confirmed,
//! whatever is killed meanwhile, and clients repeat refused updates in the next epoch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use fabric::auth::keys::Keys;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Call, CallOptions, Fault, Reply, Server, ServerConfig, Service, Shutdown, ShutdownHandle,
};
use threefs_core::chunk::ContentChange;
use threefs_core::fence::{VolumeEpoch, VolumeFence};
use threefs_core::ids::{Epoch, InodeId};
use threefs_core::message::{Address, ReadRequest, StorageReply, StorageRequest};
use threefs_core::routing::PublicState;
use threefs_core::shown::ShownEpochs;
use threefs_meta::protocol::{MetaRequest, decode_request};
use threefs_meta::{MetaQuery, MetaReply, MetaResult};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;
use crate::cluster_test::{Cluster, LONG, chains, location, whole};
use crate::error::OperationName;
use crate::routing::ChunkLocation;

const VOLUME: InodeId = InodeId(40);
const WRITERS: u32 = 6;

fn place(count: u32) -> VolumeEpoch {
    let epoch = if count == 0 { Epoch::default() } else { Epoch::new(1, count) };
    VolumeEpoch { volume: Some(VOLUME), epoch }
}

fn fence(count: u32) -> VolumeFence {
    let shown = ShownEpochs { volume: 1, below: count - 1, counts: (0..count - 1).collect() };
    VolumeFence { volume: VOLUME, epoch: Epoch::new(1, count), shown }
}

/// A metadata service that knows the epoch of one volume, and nothing else.
struct Epochs(watch::Receiver<VolumeEpoch>);

impl Service for Epochs {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request = decode_request(&call.message)?;
        let MetaRequest::Query { query: MetaQuery::Epochs { inodes }, .. } = request else {
            return Err(Fault::bad_request("only epochs"));
        };
        let places = vec![Some(*self.0.borrow()); inodes.len()];
        Reply::of::<MetaResult>(&Ok(MetaReply::Epochs(places)))
    }
}

async fn serve_epochs(
    key: &Keys,
    epochs: watch::Receiver<VolumeEpoch>,
) -> (String, ShutdownHandle) {
    let config = ServerConfig::new(threefs_meta::protocol::CONTEXT, key.clone());
    let server = Server::bind("127.0.0.1:0", config).await.unwrap();
    let address = server.address().to_string();
    let (handle, shutdown) = Shutdown::new();
    tokio::spawn(async move { server.serve(Epochs(epochs), shutdown).await });
    (address, handle)
}

/// A client that overwrites one chunk with increasing numbers.
struct Writer {
    location: ChunkLocation,
    acknowledged: Arc<AtomicU64>,
}

impl Writer {
    async fn run(self, client: Client, stop: Arc<AtomicBool>) -> u64 {
        let what: OperationName = "test".into();
        let mut number = 0_u64;
        while !stop.load(SeqCst) {
            number += 1;
            let content = Bytes::from(number.to_be_bytes().to_vec());
            let change = ContentChange::Write { offset: 0 };
            let deadline = Deadline::after(LONG);
            client.update(&what, self.location, change, content, deadline).await.unwrap();
            self.acknowledged.store(number, SeqCst);
        }
        number
    }
}

/// The number that each serving replica has in a chunk, up to an epoch.
async fn stored(client: &Client, location: ChunkLocation, epoch: Epoch) -> Vec<u64> {
    let mut attempts = crate::error::Attempts::of("test");
    let deadline = Deadline::after(LONG);
    let mut numbers = Vec::new();
    let routing = client.0.routing.current(&mut attempts, deadline).await.unwrap().unwrap();
    let chain = routing.chain(location.chain).unwrap();
    let serving = chain.targets.iter().filter(|it| it.state == PublicState::Serving);
    for target in serving.copied() {
        let to =
            Address { chain: location.chain, chain_version: chain.version, target: target.target };
        let chunk = location.chunk.in_epoch(epoch);
        let request = StorageRequest::ReadUpTo(ReadRequest { to, chunk, offset: 0, length: 8 });
        let options = CallOptions { not_after: None, class: request.class(), idle_timeout: None };
        let payload = Bytes::new().into();
        let call = client.call(&routing, target.node, &request, payload, deadline, options);
        if let Ok((Ok(StorageReply::Read(_)), content)) = call.await {
            numbers.push(u64::from_be_bytes(content[..].try_into().unwrap()));
        }
    }
    numbers
}

async fn until(goal: impl Fn() -> bool) {
    let end = Deadline::after(LONG);
    while !goal() {
        assert!(!end.passed(), "never");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_of_an_ended_epoch_is_made_after_the_confirmation() {
    let mut cluster = Cluster::of_three(64 << 20).await;
    let (publish, epochs) = watch::channel(place(0));
    let (meta, _alive) = serve_epochs(&cluster.keys(), epochs).await;
    let client = cluster.client_of(&meta);
    whole(&client).await;
    let chains = chains(&client).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (mut writers, mut chunks) = (JoinSet::new(), Vec::new());
    for index in 0..WRITERS {
        let location = location(chains[index as usize % chains.len()].0, index);
        let acknowledged = Arc::new(AtomicU64::new(0));
        chunks.push((location, Arc::clone(&acknowledged)));
        let writer = Writer { location, acknowledged };
        let (client, stop) = (client.clone(), Arc::clone(&stop));
        writers.spawn(async move { (location.chunk, writer.run(client, stop).await) });
    }
    let progress = async |by: u64| {
        for (_, acknowledged) in &chunks {
            let goal = acknowledged.load(SeqCst) + by;
            until(|| acknowledged.load(SeqCst) >= goal).await;
        }
    };
    progress(3).await;
    for count in 1..=3 {
        let ended = place(count - 1).epoch;
        let before: Vec<u64> = chunks.iter().map(|(_, it)| it.load(SeqCst)).collect();
        if count == 2 {
            // Killed while updates of the ended epoch are executed, and not waited for.
            cluster.abort_storage().await;
        }
        let raised = client.0.routing.mgmtd.raise_fence(fence(count), Deadline::after(LONG));
        raised.await.unwrap();
        // The clients do not know the next epoch: nothing changes any more.
        let mut shown = Vec::new();
        for ((location, _), acknowledged) in chunks.iter().zip(before) {
            let numbers = stored(&client, *location, ended).await;
            let number = *numbers.first().expect("no replica serves");
            assert!(numbers.iter().all(|it| *it == number), "replicas differ: {numbers:?}");
            assert!(number >= acknowledged, "an acknowledged update is missing");
            shown.push(number);
        }
        publish.send_replace(place(count));
        progress(3).await;
        if count == 2 {
            cluster.restart_first().await;
            whole(&client).await;
        }
        for ((location, _), number) in chunks.iter().zip(shown) {
            let numbers = stored(&client, *location, ended).await;
            assert!(!numbers.is_empty());
            assert!(numbers.iter().all(|it| *it == number), "{ended} has changed: {numbers:?}");
        }
    }
    stop.store(true, SeqCst);
    while let Some(writer) = writers.join_next().await {
        let (chunk, last) = writer.unwrap();
        let (location, _) = chunks.iter().find(|(it, _)| it.chunk == chunk).unwrap();
        let newest = stored(&client, *location, Epoch::MAX).await;
        assert!(newest.iter().all(|it| *it == last), "{newest:?}, the last update was {last}");
    }
}
