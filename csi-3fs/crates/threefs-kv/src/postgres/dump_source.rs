//! All rows of a store from one snapshot, for a dump.

use std::time::Duration;

use tokio_postgres::Statement;

use super::config::PostgresConfig;
use super::head::{signed, unsigned};
use super::open;
use super::server::{CallError, Server};
use super::session::{Session, Value};
use crate::{KvError, Row};

/// Time without a reply after which a dump fails: a dump need not be fast.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Rows of a page.
const PAGE_ROWS: u64 = 512;
/// The disk of the dump may stop for this long.
const SETTINGS: &str = "SET idle_in_transaction_session_timeout = '10min'";

/// The rows of a store, page by page.
pub(crate) struct DumpSource {
    server: Server,
    session: Session,
    page: Statement,
    total: u64,
    after: Vec<u8>,
}

impl DumpSource {
    /// Connects to a server, which is only read, and starts the snapshot.
    ///
    /// # Errors
    /// No server accepts writes, it is not the one that served the store, or the store is empty.
    pub(crate) async fn start(config: &PostgresConfig) -> Result<Self, KvError> {
        let server = Server::new(config)?;
        match Self::connect(&server, config).await {
            Ok((session, page, total)) => {
                Ok(Self { server, session, page, total, after: Vec::new() })
            }
            Err(error) => Err(server.error(error)),
        }
    }

    async fn connect(
        server: &Server,
        config: &PostgresConfig,
    ) -> Result<(Session, Statement, u64), CallError> {
        let session = Session::connect(server).await?;
        let (client, schema) = (&session.client, &server.schema);
        let started =
            format!("{SETTINGS}; START TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY");
        server.call(TIMEOUT, client.batch_execute(&started)).await?;
        open::check_recorded(server, &session, config.accept_restored).await?;
        let count = format!("SELECT count(*) FROM {schema}.rows");
        let count = server.call(TIMEOUT, client.query_one(&count, &[])).await?;
        let total = unsigned(count.try_get(0).map_err(|error| server.classify(&error))?);
        if total == 0 {
            let detail = "the schema has no rows; check --postgres-url and --postgres-schema";
            return Err(CallError::Refused(server.broken(detail)));
        }
        let page = format!(
            "SELECT key, value FROM {schema}.rows WHERE key > $1::bytea ORDER BY key LIMIT $2::int8"
        );
        let page = server.call(TIMEOUT, client.prepare(&page)).await?;
        Ok((session, page, total))
    }

    /// The next rows; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Vec<Row>, KvError> {
        let limit = signed(PAGE_ROWS);
        let values: [Value<'_>; 2] = [&self.after, &limit];
        let page = self.session.client.query(&self.page, &values);
        let page = self.server.call(TIMEOUT, page).await;
        let page = page.map_err(|error| self.server.error(error))?;
        let rows = page.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        let rows: Vec<Row> = rows
            .collect::<Result<_, _>>()
            .map_err(|error| self.server.error(self.server.classify(&error)))?;
        if let Some((last, _)) = rows.last() {
            self.after.clone_from(last);
        }
        Ok(rows)
    }

    /// Number of all rows.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}
