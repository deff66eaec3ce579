//! RPC service of mgmtd, with a real clock.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::auth::ticket::Grant;
use fabric::boot_instant::BootInstant;
use fabric::rpc::{
    Budget, Call, Fault, Payload, Reply, Server, ServerConfig, ServerError, Service, Shutdown,
    decode_request,
};
use threefs_core::ids::RoutingVersion;
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;
use threefs_kv::{KvError, Owner, Store};
use tokio::sync::Semaphore;

use crate::config::MgmtdConfig;
use crate::manager::Manager;
use crate::ownership::{Adoption, keep_owner, owner};
use crate::protocol::{CONTEXT, MgmtdError, MgmtdReply, MgmtdRequest, MgmtdResult, WAIT_MS_MAX};
use crate::restore;
use crate::view::Report;

/// Maximum number of calls in progress. Most are long polls, one per client, of about 2 KiB each;
/// the clients of one volume may have an eighth of them.
const CALLS_MAX: usize = 32_768;
/// Maximum per connection: a client has one long poll and a few other calls.
const CALLS_OF_CONNECTION_MAX: usize = 16;
/// Reads (status, and routing after its wait) that queue for the manager at once, separately for
/// services and volumes. So a heartbeat waits for at most twice as many, and a read of a service
/// does not wait for those of volumes.
const READS_MAX: usize = 64;

/// Why mgmtd stopped.
#[derive(Debug, thiserror::Error)]
pub enum MgmtdRunError {
    /// Invalid configuration.
    #[error("invalid mgmtd configuration: {0}")]
    Config(String),
    /// The store cannot be opened, belongs to another cluster, or failed such that only a restart
    /// recovers.
    #[error(transparent)]
    Store(#[from] KvError),
    /// The port is not available.
    #[error(transparent)]
    Listen(#[from] ServerError),
}

/// An mgmtd with an open store and a bound port that is not serving yet.
pub struct Mgmtd {
    server: Server,
    manager: Arc<Manager>,
    tick: Duration,
    owner: Owner,
    /// A store that this cluster does not own yet.
    adoption: Option<Arc<Adoption>>,
    /// Whether an operator accepts that the store was restored from an older backup.
    accepts_restored: bool,
}

/// Runs an mgmtd until shutdown.
///
/// # Errors
/// [`MgmtdRunError`].
pub fn run(
    config: MgmtdConfig,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), MgmtdRunError>> {
    Box::pin(async { Mgmtd::open(config).await?.serve(shutdown).await })
}

impl Mgmtd {
    /// Binds the port and opens the store.
    ///
    /// # Errors
    /// [`MgmtdRunError`].
    pub async fn open(config: MgmtdConfig) -> Result<Self, MgmtdRunError> {
        let server = bind(&config).await?;
        let owner = owner(&config.key, &config.store);
        let store = Store::open_owned(config.store.clone(), &owner).await?;
        Self::start(server, store, owner, config).await
    }

    /// As [`Mgmtd::open`], on a store that is open already and that others may share: one of them is
    /// the primary.
    ///
    /// # Errors
    /// [`MgmtdRunError`].
    pub async fn open_on(store: Store, config: MgmtdConfig) -> Result<Self, MgmtdRunError> {
        let server = bind(&config).await?;
        let owner = owner(&config.key, &config.store);
        Self::start(server, store, owner, config).await
    }

    async fn start(
        server: Server,
        store: Store,
        owner: Owner,
        config: MgmtdConfig,
    ) -> Result<Self, MgmtdRunError> {
        let adoption = Adoption::enter(&owner, &store).await?.map(Arc::new);
        let address = config.advertise.unwrap_or_else(|| server.address().to_string());
        let mut manager =
            Manager::new(store, rand::random(), address, config.bootstrap, config.timers)
                .owned_by(owner.clone());
        if !config.rebalance {
            manager = manager.on_demand();
        }
        let tick = Duration::from_millis(config.timers.scan_ms.max(1));
        let accepts_restored = config.store.accepts_restored();
        Ok(Self { server, manager: Arc::new(manager), tick, owner, adoption, accepts_restored })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Serves until shutdown.
    ///
    /// # Errors
    /// [`MgmtdRunError::Store`] when the store needs a restart.
    pub fn serve(self, shutdown: Shutdown) -> BoxFuture<'static, Result<(), MgmtdRunError>> {
        Box::pin(self.serve_inner(shutdown))
    }

    async fn serve_inner(self, shutdown: Shutdown) -> Result<(), MgmtdRunError> {
        let clock = Clock::start();
        let manager = Arc::clone(&self.manager);
        let adoption = self.adoption.clone();
        let handler = Handler { adoption, ..Handler::new(manager, clock, shutdown.clone()) };
        let manage = async {
            if let Some(adoption) = &self.adoption {
                adoption.complete(&self.owner, &self.manager.store).await?;
            }
            if self.accepts_restored {
                restore::mark_restored(&self.manager.store).await?;
            }
            tokio::select! {
                error = tick(&self.manager, clock, self.tick) => Err(error),
                error = keep_owner(&self.manager, &self.owner) => Err(error),
            }
        };
        tokio::select! {
            () = self.server.serve(handler, shutdown) => {}
            ended = manage => ended?,
        }
        self.manager.release(clock.now()).await;
        Ok(())
    }
}

/// Checks the configuration and binds the port.
async fn bind(config: &MgmtdConfig) -> Result<Server, MgmtdRunError> {
    config.bootstrap.check().map_err(MgmtdRunError::Config)?;
    let mut server = ServerConfig::new(CONTEXT, config.key.clone());
    server.tls = config.tls.accepts();
    server.budgets = vec![Budget { calls_max: CALLS_MAX, ..Budget::default() }];
    server.calls_per_connection_max = CALLS_OF_CONNECTION_MAX;
    Ok(Server::bind(&config.listen, server).await?)
}

async fn tick(manager: &Manager, clock: Clock, every: Duration) -> KvError {
    let mut timer = tokio::time::interval(every);
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        timer.tick().await;
        if let Err(error) = manager.tick(clock.now()).await {
            return error;
        }
    }
}

/// It continues while the machine is suspended: the lease of a primary must expire then.
#[derive(Clone, Copy)]
pub(crate) struct Clock(BootInstant);

impl Clock {
    fn start() -> Self {
        Self(BootInstant::now())
    }

    pub(crate) fn now(self) -> Millis {
        Millis(BootInstant::now().since(self.0).as_millis() as u64)
    }
}

pub(crate) struct Handler {
    pub(crate) manager: Arc<Manager>,
    pub(crate) clock: Clock,
    /// Ends long polls: a waiting handler would keep the store open.
    pub(crate) shutdown: Shutdown,
    /// Reads of services.
    reads: Semaphore,
    reads_of_volumes: Semaphore,
    encoded: Mutex<Encoded>,
    /// A store that was without an owner at the start.
    adoption: Option<Arc<Adoption>>,
}

/// The newest routing as an encoded reply, shared by all replies: a change is sent to all clients
/// at once.
#[derive(Default)]
struct Encoded(Option<(Arc<RoutingInfo>, Bytes)>);

impl Encoded {
    fn reply(&mut self, routing: &Arc<RoutingInfo>) -> Result<Reply, Fault> {
        let cached = self.0.as_ref().filter(|(cached, _)| Arc::ptr_eq(cached, routing));
        let message = match cached {
            Some((_, message)) => message.clone(),
            None => {
                let newest: MgmtdResult = Ok(MgmtdReply::Routing(Some((**routing).clone())));
                let message = Reply::of(&newest)?.message;
                self.0 = Some((Arc::clone(routing), message.clone()));
                message
            }
        };
        Ok(Reply { message, payload: Payload::empty() })
    }
}

impl Handler {
    fn new(manager: Arc<Manager>, clock: Clock, shutdown: Shutdown) -> Self {
        let (reads, reads_of_volumes) = (Semaphore::new(READS_MAX), Semaphore::new(READS_MAX));
        let (encoded, adoption) = (Mutex::default(), None);
        Self { manager, clock, shutdown, reads, reads_of_volumes, encoded, adoption }
    }

    /// The routing once it is newer than the caller's version, or nothing after the wait.
    async fn routing(
        &self,
        client_version: RoutingVersion,
        wait_ms: u64,
        reads: &Semaphore,
    ) -> Result<Reply, Fault> {
        let newest = self.newest_after(client_version, wait_ms, reads).await;
        match newest {
            Ok(routing) if routing.version > client_version => {
                self.encoded.lock().unwrap_or_else(PoisonError::into_inner).reply(&routing)
            }
            Ok(_) => Reply::of::<MgmtdResult>(&Ok(MgmtdReply::Routing(None))),
            Err(error) => Reply::of::<MgmtdResult>(&Err(error)),
        }
    }

    async fn newest_after(
        &self,
        client_version: RoutingVersion,
        wait_ms: u64,
        reads: &Semaphore,
    ) -> Result<Arc<RoutingInfo>, MgmtdError> {
        let mut changes = self.manager.subscribe();
        // A contender refuses at once rather than after the wait.
        self.newest(reads).await?;
        let newer = changes.wait_for(|routing| routing.version > client_version);
        let wait = Duration::from_millis(wait_ms.min(WAIT_MS_MAX));
        tokio::select! {
            _ = tokio::time::timeout(wait, newer) => {}
            () = self.shutdown.requested() => {}
        }
        self.newest(reads).await
    }

    async fn newest(&self, reads: &Semaphore) -> Result<Arc<RoutingInfo>, MgmtdError> {
        let _in_line = reads.acquire().await;
        self.manager.routing(self.clock.now()).await
    }

    async fn answer(&self, grant: &Grant, request: MgmtdRequest) -> Result<Reply, Fault> {
        let (manager, now) = (&self.manager, self.clock.now());
        if let Some(adoption) = &self.adoption {
            adoption.observe(&request);
        }
        let reads = if grant.ticket().is_some() { &self.reads_of_volumes } else { &self.reads };
        let result: MgmtdResult = match request {
            MgmtdRequest::Routing { known_version, wait_ms } => {
                return self.routing(known_version, wait_ms, reads).await;
            }
            MgmtdRequest::Heartbeat(heartbeat) => {
                manager.heartbeat(heartbeat, now).await.map(MgmtdReply::Heartbeat)
            }
            MgmtdRequest::LocatedHeartbeat { heartbeat, location } => {
                let report = Report { location: Some(location), ..Report::of(heartbeat) };
                manager.heartbeat_with(report, now).await.map(MgmtdReply::Heartbeat)
            }
            MgmtdRequest::SeenHeartbeat { heartbeat, location, seen } => {
                let (location, seen) = (Some(location), Some(seen));
                let report = Report { location, seen, ..Report::of(heartbeat) };
                manager.heartbeat_with(report, now).await.map(MgmtdReply::Heartbeat)
            }
            MgmtdRequest::FencedHeartbeat { heartbeat, location, seen, fences } => {
                let (location, seen) = (Some(location), Some(seen));
                let fences = Some(fences);
                manager.fenced_heartbeat(Report { heartbeat, location, seen, fences }, now).await
            }
            MgmtdRequest::Fences { known_version, wait_ms } => {
                self.fences(known_version, wait_ms).await.map(MgmtdReply::Fences)
            }
            MgmtdRequest::RaiseFence { fence, wait_ms } => {
                self.raise_fence(&fence, wait_ms).await.map(MgmtdReply::FenceRaised)
            }
            MgmtdRequest::Unconfirmed => {
                let _in_line = reads.acquire().await;
                manager.unconfirmed(self.clock.now()).await.map(MgmtdReply::Unconfirmed)
            }
            MgmtdRequest::MoveRate { bytes_per_second } => {
                manager.move_rate(bytes_per_second, now).await.map(MgmtdReply::MoveRate)
            }
            MgmtdRequest::Domains => {
                let _in_line = reads.acquire().await;
                manager.domains(self.clock.now()).await.map(MgmtdReply::Domains)
            }
            MgmtdRequest::Rebalance { apply, leaving } => {
                manager.rebalance(apply, leaving, now).await.map(MgmtdReply::Plan)
            }
            MgmtdRequest::Moves { plan } => {
                let _in_line = reads.acquire().await;
                manager.moves(plan, self.clock.now()).await.map(MgmtdReply::Moves)
            }
            MgmtdRequest::Drain { apply, change } => {
                manager.drain(apply, &change, now).await.map(MgmtdReply::Plan)
            }
            MgmtdRequest::Promote { target, apply } => {
                manager.promote(target, apply, now).await.map(MgmtdReply::Promotion)
            }
            MgmtdRequest::RegisterMeta(registration) => {
                let registered = manager.register_meta(&registration, false, now).await;
                registered.map(MgmtdReply::MetaRegistered)
            }
            MgmtdRequest::RegisterMetaWithSnapshots(registration) => {
                let registered = manager.register_meta(&registration, true, now).await;
                registered.map(MgmtdReply::MetaRegistered)
            }
            MgmtdRequest::EnableSnapshots => {
                manager.enable_snapshots(now).await.map(|()| MgmtdReply::SnapshotsEnabled)
            }
            MgmtdRequest::PublishFences { era, fences, is_last } => {
                let published = manager.publish_fences(era, &fences, is_last, now).await;
                published.map(|()| MgmtdReply::FencesPublished)
            }
            MgmtdRequest::Status => {
                let _in_line = reads.acquire().await;
                manager.status(self.clock.now()).await.map(MgmtdReply::Status)
            }
        };
        Reply::of(&result)
    }
}

/// Volume credentials may read the routing and the status.
fn permit(grant: &Grant, request: &MgmtdRequest) -> Result<(), Fault> {
    match request {
        MgmtdRequest::Routing { .. } | MgmtdRequest::Status => Ok(()),
        MgmtdRequest::MoveRate { .. } => grant.require_service("the rate of moves"),
        // It compares all pairs of nodes: a volume could keep mgmtd busy with it.
        MgmtdRequest::Domains => grant.require_service("the report of failure domains"),
        MgmtdRequest::Heartbeat(_)
        | MgmtdRequest::LocatedHeartbeat { .. }
        | MgmtdRequest::SeenHeartbeat { .. }
        | MgmtdRequest::FencedHeartbeat { .. } => grant.require_service("a heartbeat"),
        MgmtdRequest::Fences { .. } => grant.require_service("the fences of volumes"),
        MgmtdRequest::RaiseFence { .. } => grant.require_service("raising a fence"),
        MgmtdRequest::Unconfirmed => grant.require_service("the report of unconfirmed chains"),
        MgmtdRequest::Rebalance { .. } => grant.require_service("rebalancing"),
        MgmtdRequest::Moves { .. } => grant.require_service("the report of moves"),
        MgmtdRequest::Drain { .. } => grant.require_service("draining"),
        MgmtdRequest::Promote { .. } => grant.require_service("promoting a target"),
        MgmtdRequest::EnableSnapshots => grant.require_service("the first snapshot"),
        MgmtdRequest::PublishFences { .. } => grant.require_service("publishing fences"),
        MgmtdRequest::RegisterMeta(_) | MgmtdRequest::RegisterMetaWithSnapshots(_) => {
            grant.require_service("registering a metadata service")
        }
    }
}

impl Service for Handler {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request: MgmtdRequest = decode_request(&call)?;
        permit(&call.grant, &request)?;
        self.answer(&call.grant, request).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fabric::auth::ticket::Ticket;
    use fabric::rpc::{ShutdownHandle, decode};
    use threefs_core::heartbeat::{DataFolder, Heartbeat};
    use threefs_core::ids::{Incarnation, NodeId};

    use super::*;
    use crate::config::{Bootstrap, Timers};

    async fn handler() -> (Arc<Handler>, ShutdownHandle) {
        let bootstrap = Bootstrap { nodes: 1, replicas: 1, chains_per_node: 1 };
        let timers = Timers::one_machine();
        let manager = Arc::new(Manager::new(Store::memory(), 1, "mgmtd", bootstrap, timers));
        let clock = Clock::start();
        manager.tick(clock.now()).await.unwrap();
        let (handle, shutdown) = Shutdown::new();
        (Arc::new(Handler::new(manager, clock, shutdown)), handle)
    }

    fn heartbeat() -> MgmtdRequest {
        MgmtdRequest::Heartbeat(Heartbeat {
            node: NodeId(7),
            address: "127.0.0.1:1".into(),
            incarnation: Incarnation(1),
            sequence: 1,
            targets: Vec::new(),
            capacity_bytes: 0,
            data: DataFolder::Empty,
        })
    }

    fn poll() -> MgmtdRequest {
        MgmtdRequest::Routing { known_version: RoutingVersion(0), wait_ms: 0 }
    }

    /// Reads beyond the limit wait outside the manager's queue, which heartbeats use.
    #[tokio::test]
    async fn a_heartbeat_waits_for_a_bounded_number_of_reads() {
        let (handler, _alive) = handler().await;
        let in_line = handler.reads.acquire_many(READS_MAX as u32).await.unwrap();
        for request in [MgmtdRequest::Status, poll()] {
            let pending = tokio::time::timeout(
                Duration::from_millis(20),
                handler.answer(&Grant::Service, request),
            )
            .await;
            assert!(pending.is_err(), "it is waiting");
        }
        handler.answer(&Grant::Service, heartbeat()).await.unwrap();
        drop(in_line);
        handler.answer(&Grant::Service, MgmtdRequest::Status).await.unwrap();
    }

    #[tokio::test]
    async fn reads_of_volumes_do_not_delay_services() {
        let (handler, _alive) = handler().await;
        let _in_line = handler.reads_of_volumes.acquire_many(READS_MAX as u32).await.unwrap();
        let volume = Grant::Volume(Arc::new(Ticket {
            cluster: "cluster".into(),
            key_id: 1,
            directory: 7,
            path: "/volume".into(),
            read_only: false,
            node: String::new(),
            expires_unix_s: u64::MAX,
        }));
        let read = handler.answer(&volume, MgmtdRequest::Status);
        assert!(tokio::time::timeout(Duration::from_millis(20), read).await.is_err());
        for request in [heartbeat(), MgmtdRequest::Status, poll()] {
            handler.answer(&Grant::Service, request).await.unwrap();
        }
    }

    /// A change is sent to all clients at once, from one buffer.
    #[tokio::test]
    async fn all_replies_of_one_routing_share_their_memory() {
        let (handler, _alive) = handler().await;
        handler.answer(&Grant::Service, heartbeat()).await.unwrap();
        let mut changes = handler.manager.subscribe();
        handler.manager.tick(handler.clock.now()).await.unwrap();
        changes.wait_for(|routing| routing.version > RoutingVersion(0)).await.unwrap();
        let first = handler.answer(&Grant::Service, poll()).await.unwrap().message;
        let other = handler.answer(&Grant::Service, poll()).await.unwrap().message;
        assert_eq!(first.as_ptr(), other.as_ptr());
        let reply: MgmtdResult = decode(&first).unwrap();
        let routing = (**changes.borrow()).clone();
        assert_eq!(reply.unwrap(), MgmtdReply::Routing(Some(routing)));
    }
}
