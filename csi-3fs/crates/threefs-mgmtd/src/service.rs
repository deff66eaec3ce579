//! The manager behind a port, with a real clock.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::BoxFuture;
use fabric::rpc::{
    Budget, Call, Fault, Reply, Server, ServerConfig, ServerError, Service, Shutdown,
    decode_request,
};
use fabric::ticket::Grant;
use threefs_core::time::Millis;
use threefs_kv::{EmbeddedConfig, KvError, Store};

use crate::config::MgmtdConfig;
use crate::manager::Manager;
use crate::protocol::{CONTEXT, MgmtdReply, MgmtdRequest, MgmtdResult, WAIT_MS_MAX};

/// Calls in flight. Most of them are long polls, one of each client, which cost about 2 KiB each while
/// they wait; the clients of one volume may have an eighth of them.
const CALLS_MAX: usize = 32_768;
/// Those of one connection: a client has one long poll and a few questions.
const CALLS_OF_CONNECTION_MAX: usize = 16;

/// Why an mgmtd ended.
#[derive(Debug, thiserror::Error)]
pub enum MgmtdRunError {
    /// It cannot begin with this configuration.
    #[error("mgmtd's configuration: {0}")]
    Config(String),
    /// Its store cannot be opened, or failed in a way from which only a restart recovers.
    #[error(transparent)]
    Store(#[from] KvError),
    /// Its port cannot be taken.
    #[error(transparent)]
    Listen(#[from] ServerError),
}

/// An mgmtd that holds its store and its port and has not begun to serve.
pub struct Mgmtd {
    server: Server,
    manager: Arc<Manager>,
    tick: Duration,
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
    /// Opens the store, takes the port.
    ///
    /// # Errors
    /// [`MgmtdRunError`].
    pub async fn open(config: MgmtdConfig) -> Result<Self, MgmtdRunError> {
        config.bootstrap.check().map_err(MgmtdRunError::Config)?;
        let mut server = ServerConfig::new(CONTEXT, config.key.clone());
        server.tls = config.tls.accepts();
        server.budgets = vec![Budget { calls_max: CALLS_MAX, ..Budget::default() }];
        server.calls_of_connection_max = CALLS_OF_CONNECTION_MAX;
        let server = Server::bind(&config.listen, server).await?;
        let store = Store::embedded(EmbeddedConfig::new(config.store_path))?;
        let address = config.advertise.unwrap_or_else(|| server.address().to_string());
        let mut manager =
            Manager::new(store, rand::random(), address, config.bootstrap, config.timers);
        if !config.rebalance {
            manager = manager.on_demand();
        }
        let tick = Duration::from_millis(config.timers.scan_ms.max(1));
        Ok(Self { server, manager: Arc::new(manager), tick })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Serves until shutdown.
    ///
    /// # Errors
    /// [`MgmtdRunError::Store`] when the store needs a restart.
    pub fn serve(self, shutdown: Shutdown) -> BoxFuture<'static, Result<(), MgmtdRunError>> {
        Box::pin(self.serve_now(shutdown))
    }

    async fn serve_now(self, shutdown: Shutdown) -> Result<(), MgmtdRunError> {
        let clock = Clock(Instant::now());
        let manager = Arc::clone(&self.manager);
        let handler = Handler { manager, clock, shutdown: shutdown.clone() };
        tokio::select! {
            () = self.server.serve(handler, shutdown) => Ok(()),
            error = tick(&self.manager, clock, self.tick) => Err(error.into()),
        }
    }
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

#[derive(Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> Millis {
        Millis(self.0.elapsed().as_millis() as u64)
    }
}

struct Handler {
    manager: Arc<Manager>,
    clock: Clock,
    /// Ends long polls: a handler that waits would hold the store open.
    shutdown: Shutdown,
}

impl Handler {
    async fn answer(&self, request: MgmtdRequest) -> MgmtdResult {
        match request {
            MgmtdRequest::Heartbeat(heartbeat) => {
                let reply = self.manager.heartbeat(heartbeat, self.clock.now()).await?;
                Ok(MgmtdReply::Heartbeat(reply))
            }
            MgmtdRequest::Routing { known, wait_ms } => {
                let mut changes = self.manager.subscribe();
                // Refuses at once what is not primary, instead of after the wait.
                self.manager.routing(self.clock.now()).await?;
                let newer = changes.wait_for(|routing| routing.version > known);
                let wait = Duration::from_millis(wait_ms.min(WAIT_MS_MAX));
                tokio::select! {
                    _ = tokio::time::timeout(wait, newer) => {}
                    () = self.shutdown.requested() => {}
                }
                let routing = self.manager.routing(self.clock.now()).await?;
                let newer = (routing.version > known).then(|| (*routing).clone());
                Ok(MgmtdReply::Routing(newer))
            }
            MgmtdRequest::Rebalance { apply, leaving } => {
                let plan = self.manager.rebalance(apply, leaving, self.clock.now()).await?;
                Ok(MgmtdReply::Plan(plan))
            }
            MgmtdRequest::Promote { target, apply } => {
                let promotion = self.manager.promote(target, apply, self.clock.now()).await?;
                Ok(MgmtdReply::Promotion(promotion))
            }
            MgmtdRequest::RegisterMeta(registration) => {
                let now = self.clock.now();
                let registered = self.manager.register_meta(&registration, now).await?;
                Ok(MgmtdReply::MetaRegistered(registered))
            }
            MgmtdRequest::Status => {
                Ok(MgmtdReply::Status(self.manager.status(self.clock.now()).await?))
            }
        }
    }
}

/// Credentials of volumes read where chunks are and how much space is left.
fn permit(grant: &Grant, request: &MgmtdRequest) -> Result<(), Fault> {
    match request {
        MgmtdRequest::Routing { .. } | MgmtdRequest::Status => Ok(()),
        MgmtdRequest::Heartbeat(_) => grant.require_service("a heartbeat"),
        MgmtdRequest::Rebalance { .. } => grant.require_service("rebalancing"),
        MgmtdRequest::Promote { .. } => grant.require_service("promoting a target"),
        MgmtdRequest::RegisterMeta(_) => grant.require_service("registering a metadata service"),
    }
}

impl Service for Handler {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request: MgmtdRequest = decode_request(&call)?;
        permit(&call.grant, &request)?;
        Reply::of(&self.answer(request).await)
    }
}
