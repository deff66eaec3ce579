//! Messages to the successor for small updates, with a real store.

use std::sync::Mutex;
use std::time::Duration;

use fabric::auth::Key;
use fabric::auth::capability::Presented;
use fabric::rpc::decode;
use fabric::rpc::{Call, Fault, Reply, Server, ServerConfig, Service, Shutdown, ShutdownHandle};
use threefs_core::ids::{ChainId, ChainVersion, Incarnation, NodeId, StoreId, TargetId};
use threefs_core::location::Location;
use threefs_core::message::{ForwardRequest, StorageReply, StorageRequest, StorageResult, Updated};
use threefs_core::replica::Config;
use threefs_core::routing::{Chain, ChainTarget, NodeInfo, PublicState, RoutingInfo};
use threefs_core::time::Millis;

use super::*;
use crate::context::NodeContext;
use crate::scrub::Scrub;
use crate::target::StoreUsage;
use crate::target::tests::{context, write};

const SLOW: Duration = Duration::from_millis(5);

/// A successor that makes everything, and the kinds of its requests.
#[derive(Default)]
struct Successor(Mutex<Vec<&'static str>>);

impl Successor {
    fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Service for Successor {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let (request, _): (StorageRequest, Presented) = decode(&call.message).unwrap();
        let made = |request: &ForwardRequest| {
            StorageReply::Updated(Updated {
                version: request.version,
                length: 4,
                checksum: request.chunk_checksum,
                chain_version: ChainVersion(2),
            })
        };
        let (kind, reply) = match &request {
            StorageRequest::Prepare(_) => ("prepare", StorageReply::Prepared),
            StorageRequest::Confirm(request) => ("confirm", made(request)),
            StorageRequest::Forward(request) => ("forward", made(request)),
            other => panic!("{other:?}"),
        };
        self.0.lock().unwrap().push(kind);
        Reply::of(&StorageResult::Ok(reply))
    }
}

/// The head of a chain of two, and its successor.
async fn chain(folder: &std::path::Path) -> (Arc<Target>, Arc<Successor>, ShutdownHandle) {
    let key = Key::from_bytes(b"a key of sixteen bytes or more").unwrap();
    let server = Server::bind("127.0.0.1:0", ServerConfig::new(crate::CONTEXT, key)).await.unwrap();
    let (address, (keep, shutdown)) = (server.address().to_string(), Shutdown::new());
    let successor = Arc::new(Successor::default());
    tokio::spawn(server.serve(Arc::clone(&successor), shutdown));
    let context: Arc<NodeContext> = context();
    let node = NodeInfo { id: NodeId(2), address, location: Location::default() };
    let nodes = [(node.id, node)].into();
    *context.routing.write().unwrap() = Arc::new(RoutingInfo { nodes, ..RoutingInfo::default() });
    let store = crate::store::open(folder, Arc::default()).unwrap();
    let usage = StoreUsage { id: StoreId(5), used_bytes: 1, chunks: 0 };
    let scrub = Scrub::open(std::path::Path::new("/nonexistent"), 0, StoreId(5));
    let config = Config::new(TargetId(1), ChainId(1), Incarnation(1));
    let target = Target::new(config, store, usage, scrub, folder.into(), context);
    let place = |id, state| ChainTarget { target: TargetId(id), node: NodeId(id as u32), state };
    let chain = |version, state| Chain {
        id: ChainId(1),
        version: ChainVersion(version),
        targets: vec![place(1, state), place(2, PublicState::Serving)],
    };
    target.handle(Event::Routing(chain(1, PublicState::LastSrv)));
    target.handle(Event::Routing(chain(2, PublicState::Serving)));
    target.handle(Event::Lease { valid_until: Millis(u64::MAX) });
    (target, successor, keep)
}

fn flushes_take(target: &Target, took: Duration) {
    (0..100).for_each(|_| target.context.flushes.load.flushed(took));
}

#[tokio::test]
async fn updates_under_load_on_a_quick_disk_are_forwarded_without_a_prepare() {
    let folder = tempfile::tempdir().unwrap();
    let (target, successor, _keep) = chain(folder.path()).await;
    assert!(write(&target, 0).await.is_ok());
    assert_eq!(successor.take(), ["prepare", "confirm"], "alone");
    let load = &target.context.flushes.load;
    let _updates: Vec<_> = (0..1_000).map(|_| load.start()).collect();
    flushes_take(&target, SLOW);
    assert!(write(&target, 1).await.is_ok());
    assert_eq!(successor.take(), ["prepare", "confirm"], "on a slow disk");
    flushes_take(&target, Duration::ZERO);
    assert!(write(&target, 2).await.is_ok());
    assert_eq!(successor.take(), ["forward"]);
}
