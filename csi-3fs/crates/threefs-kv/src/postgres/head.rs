//! Head row: the newest commit of a store. Commits hold its lock, so its version is their order.

use tokio_postgres::Row;

use crate::KvError;

/// Random id of a store or of a batch of commits.
pub(crate) type Id = [u8; 16];

/// A commit in the history of a store: another history has another batch at this version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Point {
    pub version: u64,
    pub batch: Id,
}

/// The head row, and the settings of the server that decide whether commits are durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub store: Id,
    pub point: Point,
    pub settings: Settings,
}

/// Settings of a server that can be changed while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub fsync: String,
    pub full_page_writes: String,
    pub synchronous_standby_names: String,
}

impl Head {
    /// Columns of [`Head::parse`].
    pub(crate) const COLUMNS: &str = "version, batch, store, current_setting('fsync'), \
         current_setting('full_page_writes'), current_setting('synchronous_standby_names')";

    pub(crate) fn parse(row: &Row) -> Result<Self, tokio_postgres::Error> {
        let id = |bytes: &[u8]| Id::try_from(bytes).unwrap_or_default();
        let version = unsigned(row.try_get(0)?);
        let point = Point { version, batch: id(row.try_get(1)?) };
        let settings = Settings {
            fsync: row.try_get(3)?,
            full_page_writes: row.try_get(4)?,
            synchronous_standby_names: row.try_get(5)?,
        };
        Ok(Self { store: id(row.try_get(2)?), point, settings })
    }
}

impl Settings {
    /// Why an acknowledged commit could be lost, with the remedy.
    pub(crate) fn check(&self, accept_single: bool) -> Result<(), String> {
        for (name, value) in [("fsync", &self.fsync), ("full_page_writes", &self.full_page_writes)]
        {
            if value != "on" {
                return Err(format!(
                    "{name} is {value}, so a crash loses acknowledged changes; set {name} = on in \
                     postgresql.conf and reload the server"
                ));
            }
        }
        if !accept_single && self.synchronous_standby_names.trim().is_empty() {
            return Err("synchronous_standby_names is empty, so acknowledged changes are on one \
                        server only; set it, for example to ANY 1 (pg_1, pg_2), or accept one \
                        server with --no-postgres-require-standby"
                .into());
        }
        Ok(())
    }
}

/// PostgreSQL's integers are signed.
pub(crate) fn signed(version: u64) -> i64 {
    i64::try_from(version).unwrap_or(i64::MAX)
}

/// See [`signed`].
pub(crate) fn unsigned(version: i64) -> u64 {
    u64::try_from(version).unwrap_or(0)
}

/// The name of a store, in errors.
pub(crate) fn broken(store: &str, detail: impl Into<String>) -> KvError {
    KvError::Broken { store: store.into(), detail: detail.into() }
}

#[cfg(test)]
mod tests {
    use super::Settings;

    #[test]
    fn a_server_that_can_lose_acknowledged_commits_is_refused_with_the_setting() {
        let good = Settings {
            fsync: "on".into(),
            full_page_writes: "on".into(),
            synchronous_standby_names: "ANY 1 (a, b)".into(),
        };
        assert_eq!(good.check(false), Ok(()));
        let fsync = Settings { fsync: "off".into(), ..good.clone() };
        let pages = Settings { full_page_writes: "off".into(), ..good.clone() };
        let single = Settings { synchronous_standby_names: " ".into(), ..good };
        assert!(fsync.check(true).is_err_and(|error| error.contains("fsync = on")));
        assert!(pages.check(true).is_err_and(|error| error.contains("full_page_writes = on")));
        assert!(single.check(false).is_err_and(|error| error.contains("ANY 1")));
        assert_eq!(single.check(true), Ok(()));
    }
}
