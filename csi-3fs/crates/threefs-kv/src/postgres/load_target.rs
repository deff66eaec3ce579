//! An empty store that is filled with the rows of a dump, in one transaction: it is complete or
//! empty, and holds the lock of the store, so no service starts meanwhile.

use std::time::Duration;

use tokio_postgres::Statement;

use super::config::PostgresConfig;
use super::head::{Point, signed};
use super::open;
use super::server::{CallError, Server};
use super::session::{Session, Value};
use super::writer::Writer;
use crate::KvError;

/// Rows of a statement.
const BATCH_ROWS: usize = 4000;
/// Bytes of a statement of several rows.
const BATCH_BYTES: usize = 4 << 20;
/// Timeout of a statement; the last one includes the standby's acknowledgement of everything.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The file of the dump may stop for this long.
const SETTINGS: &str = "SET idle_in_transaction_session_timeout = '10min'";

/// A store that is being filled.
pub(crate) struct LoadTarget {
    server: Server,
    session: Session,
    insert: Statement,
    point: Point,
    pending: Vec<(Vec<u8>, Vec<u8>)>,
    pending_bytes: usize,
}

impl LoadTarget {
    /// Locks an empty store; `None` if it has rows, or a service has served it.
    ///
    /// # Errors
    /// No server accepts writes, or it is not durable.
    pub(crate) async fn start(config: &PostgresConfig) -> Result<Option<Self>, KvError> {
        let server = Server::new(config)?;
        match Self::lock(&server, config).await {
            Ok(None) => Ok(None),
            Ok(Some((session, insert, point))) => {
                let (pending, pending_bytes) = (Vec::new(), 0);
                Ok(Some(Self { server, session, insert, point, pending, pending_bytes }))
            }
            Err(error) => Err(server.error(error)),
        }
    }

    async fn lock(
        server: &Server,
        config: &PostgresConfig,
    ) -> Result<Option<(Session, Statement, Point)>, CallError> {
        let session = Session::connect(server).await?;
        open::create(server, &session, config).await?;
        server.call(TIMEOUT, session.client.batch_execute(SETTINGS)).await?;
        open::start_locked(server, &session).await?;
        open::check_recorded(server, &session, config.accept_restored).await?;
        let head = open::read_head(server, &session).await?;
        let schema = &server.schema;
        let empty = format!(
            "SELECT NOT served AND NOT EXISTS (SELECT 1 FROM {schema}.rows) FROM {schema}.head"
        );
        let row = server.call(TIMEOUT, session.client.query_one(&empty, &[])).await?;
        if !row.try_get::<_, bool>(0).map_err(|error| server.classify(&error))? {
            return Ok(None);
        }
        let insert = format!(
            "INSERT INTO {schema}.rows SELECT key, value, $3::int8 \
             FROM unnest($1::bytea[], $2::bytea[]) AS put (key, value)"
        );
        let insert = server.call(TIMEOUT, session.client.prepare(&insert)).await?;
        let point = Point { version: head.point.version + 1, batch: rand::random() };
        Ok(Some((session, insert, point)))
    }

    /// Writes a row, with others.
    ///
    /// # Errors
    /// The disk of the server is full, or no reply.
    pub(crate) async fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), KvError> {
        let bytes = key.len() + value.len();
        if self.pending.len() == BATCH_ROWS || self.pending_bytes + bytes > BATCH_BYTES {
            self.flush().await?;
        }
        self.pending_bytes += bytes;
        self.pending.push((key, value));
        Ok(())
    }

    /// Sends the rows that wait.
    async fn flush(&mut self) -> Result<(), KvError> {
        self.pending_bytes = 0;
        let pending = std::mem::take(&mut self.pending);
        let keys: Vec<&[u8]> = pending.iter().map(|(key, _)| key.as_slice()).collect();
        let values: Vec<&[u8]> = pending.iter().map(|(_, value)| value.as_slice()).collect();
        let version = signed(self.point.version);
        let parameters: [Value<'_>; 3] = [&keys, &values, &version];
        let sent = self.session.client.execute(&self.insert, &parameters);
        let sent = self.server.call(TIMEOUT, sent).await;
        sent.map(drop).map_err(|error| self.server.error(error))
    }

    /// Commits the load: services can serve the store.
    ///
    /// # Errors
    /// As [`LoadTarget::put`]; [`KvError::CommitUnknown`] if no server knows the outcome.
    pub(crate) async fn finish(mut self) -> Result<(), KvError> {
        self.flush().await?;
        let (schema, version) = (&self.server.schema, self.point.version);
        let batch: String = self.point.batch.iter().map(|byte| format!("{byte:02x}")).collect();
        let commit = format!(
            "INSERT INTO {schema}.commits VALUES ({version}, '\\x{batch}', '{{}}'); \
             UPDATE {schema}.head SET version = {version}, batch = '\\x{batch}'; COMMIT"
        );
        self.session.take_warning();
        let committed = self.server.call(TIMEOUT, self.session.client.batch_execute(&commit)).await;
        let detail = match committed {
            Ok(()) if !self.session.take_warning() => return Ok(()),
            Ok(()) => "the wait for the standby was cancelled".into(),
            Err(CallError::Failed(detail)) => detail,
            Err(error) => return Err(self.server.error(error)),
        };
        let Self { server, session, point, .. } = self;
        drop(session);
        let found = async {
            let writer = Writer::connect(&server).await?;
            writer.find(&server, point).await
        };
        match found.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(server.unavailable(detail)),
            Err(_) => Err(KvError::CommitUnknown { detail }),
        }
    }
}
