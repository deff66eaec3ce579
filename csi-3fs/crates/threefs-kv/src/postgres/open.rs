//! Checks of a server before its first use, and the tables of a store.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::config::PostgresConfig;
use super::head::{Head, Id, Settings, signed};
use super::server::{CallError, RESTORED, Server};
use super::session::Session;
use crate::KvError;

const FORMAT: i32 = 1;
/// Time for the server to accept writes.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a statement, with the acknowledgement of the standby.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Oldest major version of PostgreSQL, times 10,000.
const VERSION_MIN: i32 = 130_000;
/// Key of the advisory lock under which tables are created.
const CREATION_LOCK: i64 = 0x33_6673_6b76;

/// Connects to a server, creates the tables, and records that a service uses them: the standby
/// must acknowledge it.
///
/// # Errors
/// No server accepts writes, or it is not durable, or not the one that served the store.
pub(crate) async fn open(config: &PostgresConfig) -> Result<Arc<Server>, KvError> {
    let server = Arc::new(Server::new(config)?);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match try_open(&server, config).await {
            Ok(()) => return Ok(server),
            Err(CallError::Failed(_) | CallError::Rejected(_))
                if Instant::now() + PAUSE < deadline =>
            {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(server.error(error)),
        }
    }
}

async fn try_open(server: &Server, config: &PostgresConfig) -> Result<(), CallError> {
    let session = Session::connect(server).await?;
    create(server, &session, config).await?;
    session.check_history(server).await?;
    let schema = &server.schema;
    start_locked(server, &session).await?;
    check_recorded(server, &session, config.accept_restored).await?;
    let record = format!(
        "UPDATE {schema}.head SET served = true, system = \
         (SELECT system_identifier FROM pg_control_system()); COMMIT"
    );
    session.take_warning();
    match server.call(CALL_TIMEOUT, session.client.batch_execute(&record)).await {
        Ok(()) if session.take_warning() => {
            Err(CallError::Failed("the wait for the standby was cancelled".into()))
        }
        Err(CallError::Failed(detail)) => Err(CallError::Failed(format!(
            "{detail}; if the server runs, none of the standbys in synchronous_standby_names \
             acknowledges: start one"
        ))),
        result => result,
    }
}

/// Starts a transaction and waits for the lock of the store.
pub(crate) async fn start_locked(server: &Server, session: &Session) -> Result<(), CallError> {
    let lock = format!("START TRANSACTION; SELECT 1 FROM {}.head FOR UPDATE", server.schema);
    server.call(CALL_TIMEOUT, session.client.batch_execute(&lock)).await
}

/// Checks the version and the settings of a server, and creates the tables of the store, if they
/// are absent.
pub(crate) async fn create(
    server: &Server,
    session: &Session,
    config: &PostgresConfig,
) -> Result<(), CallError> {
    let schema = &server.schema;
    let state = format!(
        "SELECT current_setting('server_version_num')::int4, current_setting('fsync'), \
         current_setting('full_page_writes'), current_setting('synchronous_standby_names'), \
         to_regclass('{schema}.head') IS NOT NULL, to_regnamespace('{schema}') IS NOT NULL"
    );
    let row = server.call(CALL_TIMEOUT, session.client.query_one(&state, &[])).await?;
    let classify = |error| server.classify(&error);
    let version: i32 = row.try_get(0).map_err(classify)?;
    if version < VERSION_MIN {
        let detail = format!("its version is {version}; PostgreSQL 13 or newer is needed");
        return Err(CallError::Refused(server.broken(detail)));
    }
    let settings = Settings {
        fsync: row.try_get(1).map_err(classify)?,
        full_page_writes: row.try_get(2).map_err(classify)?,
        synchronous_standby_names: row.try_get(3).map_err(classify)?,
    };
    let checked = settings.check(config.accept_single);
    checked.map_err(|detail| CallError::Refused(server.broken(detail)))?;
    let (tables, namespace): (bool, bool) =
        (row.try_get(4).map_err(classify)?, row.try_get(5).map_err(classify)?);
    if tables {
        return Ok(());
    }
    let ddl = tables_of(schema, namespace);
    server.call(TIMEOUT, session.client.batch_execute(&ddl)).await
}

/// The tables of a store. Its first version is from the clock: stamps in keys of a dump, which are
/// of other stores, are then not used again.
fn tables_of(schema: &str, namespace: bool) -> String {
    let hex = |id: Id| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (store, batch) = (hex(rand::random()), hex(rand::random()));
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let version = signed(u64::try_from(since_epoch.as_millis()).unwrap_or(0) << 12);
    let create_schema =
        if namespace { String::new() } else { format!("CREATE SCHEMA IF NOT EXISTS {schema};") };
    format!(
        "START TRANSACTION; SELECT pg_advisory_xact_lock({CREATION_LOCK}); {create_schema}
         CREATE TABLE IF NOT EXISTS {schema}.rows (
             key bytea PRIMARY KEY, value bytea NOT NULL, version int8 NOT NULL
         ) WITH (autovacuum_vacuum_scale_factor = 0.05);
         ALTER TABLE {schema}.rows ALTER COLUMN value SET STORAGE EXTERNAL;
         CREATE TABLE IF NOT EXISTS {schema}.commits (
             version int8 PRIMARY KEY, id bytea NOT NULL, written int4[]
         ) WITH (autovacuum_vacuum_scale_factor = 0.1);
         CREATE TABLE IF NOT EXISTS {schema}.head (
             one bool PRIMARY KEY CHECK (one), format int4 NOT NULL, store bytea NOT NULL,
             version int8 NOT NULL, batch bytea NOT NULL, system int8, served bool NOT NULL
         ) WITH (fillfactor = 10);
         INSERT INTO {schema}.head SELECT true, {FORMAT}, '\\x{store}', {version}, '\\x{batch}', \
             NULL, false ON CONFLICT DO NOTHING;
         INSERT INTO {schema}.commits SELECT version, batch, '{{}}' FROM {schema}.head \
             ON CONFLICT DO NOTHING;
         COMMIT"
    )
}

/// Checks the recorded format and server, in a transaction.
pub(crate) async fn check_recorded(
    server: &Server,
    session: &Session,
    accept_restored: bool,
) -> Result<(), CallError> {
    let statement = format!(
        "SELECT format, system, (SELECT system_identifier FROM pg_control_system()) FROM {}.head",
        server.schema
    );
    let row = server.call(CALL_TIMEOUT, session.client.query_one(&statement, &[])).await?;
    let classify = |error| server.classify(&error);
    let format: i32 = row.try_get(0).map_err(classify)?;
    if format != FORMAT {
        let detail = format!("its format is {format}, this program knows {FORMAT}; update it");
        return Err(CallError::Refused(server.broken(detail)));
    }
    let (before, now): (Option<i64>, i64) =
        (row.try_get(1).map_err(classify)?, row.try_get(2).map_err(classify)?);
    match before {
        Some(before) if before != now && !accept_restored => {
            let detail = format!(
                "the store was last served by the database system {before}, this is {now}: \
                 {RESTORED}"
            );
            Err(CallError::Refused(server.broken(detail)))
        }
        _ => Ok(()),
    }
}

/// The head row, with the settings of the server.
pub(crate) async fn read_head(server: &Server, session: &Session) -> Result<Head, CallError> {
    let statement = format!("SELECT {} FROM {}.head", Head::COLUMNS, server.schema);
    let row = server.call(CALL_TIMEOUT, session.client.query_one(&statement, &[])).await?;
    Head::parse(&row).map_err(|error| server.classify(&error))
}
