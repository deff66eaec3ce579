//! Prepared statements of a batch of commits.

use tokio_postgres::{Client, Error, Statement};

use super::head::Head;

/// Commits whose rows are kept. They decide lost replies and prove the history for a minute, and
/// notify watches.
pub(crate) const COMMITS_KEPT: u64 = 50_000;

pub(crate) struct Statements {
    /// Waits for the lock of the store.
    pub lock: Statement,
    pub versions: Statement,
    pub counters: Statement,
    /// Ordinal numbers of ranges with a newer row.
    pub violated: Statement,
    pub delete: Statement,
    pub delete_range: Statement,
    pub put: Statement,
    /// Records a batch, and forgets an old one.
    pub record: Statement,
    pub forget: Statement,
    pub advance: Statement,
    /// The batch of a version.
    pub find: Statement,
    /// Changes nothing, but makes the transaction wait for the standby.
    pub touch: Statement,
}

impl Statements {
    pub(crate) async fn prepare(client: &Client, schema: &str) -> Result<Self, Error> {
        let columns = Head::COLUMNS;
        let prepare = async |text: String| client.prepare(&text).await;
        Ok(Self {
            lock: prepare(format!("SELECT {columns} FROM {schema}.head FOR UPDATE")).await?,
            versions: prepare(format!(
                "SELECT key, version FROM {schema}.rows WHERE key = ANY ($1::bytea[])"
            ))
            .await?,
            counters: prepare(format!(
                "SELECT key, value FROM {schema}.rows WHERE key = ANY ($1::bytea[])"
            ))
            .await?,
            violated: prepare(format!(
                "SELECT number FROM unnest($1::bytea[], $2::bytea[], $3::int8[]) \
                 WITH ORDINALITY AS read (first, last, seen, number) \
                 WHERE EXISTS (SELECT 1 FROM {schema}.rows \
                 WHERE key >= read.first AND key < read.last AND version > read.seen)"
            ))
            .await?,
            delete: prepare(format!("DELETE FROM {schema}.rows WHERE key = ANY ($1::bytea[])"))
                .await?,
            delete_range: prepare(format!(
                "DELETE FROM {schema}.rows WHERE key >= $1::bytea AND key < $2::bytea RETURNING key"
            ))
            .await?,
            put: prepare(format!(
                "INSERT INTO {schema}.rows SELECT key, value, $3::int8 \
                 FROM unnest($1::bytea[], $2::bytea[]) AS put (key, value) \
                 ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version"
            ))
            .await?,
            record: prepare(format!(
                "INSERT INTO {schema}.commits VALUES ($1::int8, $2::bytea, $3::int4[])"
            ))
            .await?,
            forget: prepare(format!(
                "DELETE FROM {schema}.commits WHERE version < $1::int8 - {COMMITS_KEPT}"
            ))
            .await?,
            advance: prepare(format!(
                "UPDATE {schema}.head SET version = $1::int8, batch = $2::bytea"
            ))
            .await?,
            find: prepare(format!("SELECT id FROM {schema}.commits WHERE version = $1::int8"))
                .await?,
            touch: prepare(format!("UPDATE {schema}.head SET served = served")).await?,
        })
    }
}
