//! Session: one connection to the server that accepts writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio_postgres::error::{DbError, Severity};
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Connection, NoTls, Socket};

use super::head::{Head, Id, signed};
use super::server::{CallError, Server};

/// Timeout for a connection to any host, and for the check of its history.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Settings of each session. Locks are waited for briefly, so that callers can repeat; a session
/// whose process stops ends its transaction. A timeout of statements would end the wait for the
/// standby and report a commit that only the primary has, so there is none.
const SETTINGS: &str = "SET statement_timeout = 0; SET lock_timeout = '3s'; \
     SET idle_in_transaction_session_timeout = '15s'; SET tcp_user_timeout = '10s'; \
     SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; \
     SET enable_mergejoin = off; SET jit = off; SET plan_cache_mode = force_generic_plan; \
     SELECT set_config('synchronous_commit', 'on', false) \
     WHERE current_setting('synchronous_commit') <> 'remote_apply'";
const TIMELINE: &str =
    "SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int4";

/// A parameter of a statement.
pub(crate) type Value<'a> = &'a (dyn ToSql + Sync);

pub(crate) struct Session {
    pub client: Client,
    /// Whether the server has sent a warning.
    warned: Arc<AtomicBool>,
    driver: JoinHandle<()>,
}

impl Session {
    /// Connects to the host that accepts writes.
    pub(crate) async fn connect(server: &Server) -> Result<Self, CallError> {
        server.check()?;
        let connecting = async {
            let connector = &server.connector;
            let session = match &connector.tls {
                Some(tls) => {
                    let connected = connector.config.connect(tls.clone()).await;
                    connected.map(|(client, connection)| Self::new(client, connection))
                }
                None => {
                    let connected = connector.config.connect(NoTls).await;
                    connected.map(|(client, connection)| Self::new(client, connection))
                }
            };
            let session = session.map_err(|error| server.classify(&error))?;
            session.prepare(server).await?;
            Ok(session)
        };
        let timeout = || CallError::Failed(format!("not connected in {CONNECT_TIMEOUT:?}"));
        tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| Err(timeout()))
    }

    fn new<T: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        client: Client,
        mut connection: Connection<Socket, T>,
    ) -> Self {
        let warned = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&warned);
        let driver = tokio::spawn(async move {
            // Replies are passed on in the order of the server's messages, so a warning is known
            // before the end of its statement.
            while let Some(Ok(message)) =
                std::future::poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notice(notice) = message
                    && is_warning(&notice)
                {
                    tracing::warn!(notice = notice.message(), "a warning of PostgreSQL");
                    flag.store(true, SeqCst);
                }
            }
        });
        Self { client, warned, driver }
    }

    /// Sets the session's parameters, and checks that the server knows what others have reported.
    async fn prepare(&self, server: &Server) -> Result<(), CallError> {
        let classify = |error| server.classify(&error);
        self.client.batch_execute(SETTINGS).await.map_err(classify)?;
        let timeline = self.client.query_one(TIMELINE, &[]).await.map_err(classify)?;
        let timeline: i32 = timeline.try_get(0).map_err(classify)?;
        server.check_timeline(timeline.cast_unsigned())
    }

    /// Checks that the history of the server contains the newest commit that this process knows.
    pub(crate) async fn check_history(&self, server: &Server) -> Result<(), CallError> {
        let (floor, schema) = (server.newest(), &server.schema);
        let statement = format!(
            "SELECT {}, (SELECT id FROM {schema}.commits WHERE version = $1) FROM {schema}.head",
            Head::COLUMNS
        );
        let version = signed(floor.version);
        let values: [Value<'_>; 1] = [&version];
        let read = self.client.query_one(&statement, &values);
        let row = server.call(CONNECT_TIMEOUT, read).await?;
        let head = Head::parse(&row).map_err(|error| server.classify(&error))?;
        server.observe(&head, floor).map_err(CallError::Refused)?;
        if floor.version > 0 {
            let batch: Option<&[u8]> = row.try_get(6).map_err(|error| server.classify(&error))?;
            let batch = batch.and_then(|id| Id::try_from(id).ok());
            let checked = server.check_history(floor, batch, head.point.version);
            checked.map_err(CallError::Refused)?;
        }
        Ok(())
    }

    /// Whether the server has sent a warning since the last call.
    pub(crate) fn take_warning(&self) -> bool {
        self.warned.swap(false, SeqCst)
    }
}

impl Drop for Session {
    /// Closes the connection also if the server does not reply.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn is_warning(notice: &DbError) -> bool {
    !matches!(
        notice.parsed_severity(),
        Some(Severity::Notice | Severity::Info | Severity::Log | Severity::Debug)
    )
}
