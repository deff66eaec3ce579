//! State of all sessions of a store: its history, which must not go back, and its errors.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio_postgres::Error;
use tokio_postgres::error::{Severity, SqlState};

use super::config::{Connector, PostgresConfig};
use super::head::{Head, Id, Point, broken};
use super::statements::COMMITS_KEPT;
use crate::KvError;

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    /// It is invalid or not allowed, and was not executed; a repetition fails as well.
    Refused(KvError),
    /// The disk of the server is full; it was not executed.
    NoSpace(String),
    /// The server refused it now; it was not executed.
    Rejected(String),
    /// No reply: the session is over, and whether it was executed is unknown.
    Failed(String),
}

/// A store on a server.
pub(crate) struct Server {
    /// Name of the store in errors.
    name: String,
    pub schema: String,
    pub connector: Connector,
    accept_single: bool,
    state: Mutex<State>,
    failed: OnceLock<KvError>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    store: Option<Id>,
    newest: Point,
    /// A promoted server has a higher one than its former primary.
    timeline: u32,
}

impl Server {
    pub(crate) fn new(config: &PostgresConfig) -> Result<Self, KvError> {
        Ok(Self {
            name: config.name(),
            schema: config.schema.clone(),
            connector: config.connector()?,
            accept_single: config.accept_single,
            state: Mutex::default(),
            failed: OnceLock::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest commit in any reply.
    pub(crate) fn newest(&self) -> Point {
        self.state().newest
    }

    /// Refuses a former primary: it may not know that another server was promoted.
    pub(crate) fn check_timeline(&self, timeline: u32) -> Result<(), CallError> {
        let mut state = self.state();
        state.timeline = state.timeline.max(timeline);
        if timeline == state.timeline {
            return Ok(());
        }
        Err(CallError::Failed(format!(
            "the server is a former primary: its timeline is {timeline}, another server's is {}",
            state.timeline
        )))
    }

    /// Checks the head row of a call that was sent when the newest commit was `floor`: the history
    /// never goes back, unless the store was restored or a standby without all commits promoted.
    ///
    /// # Errors
    /// All further calls fail, or the server is not durable.
    pub(crate) fn observe(&self, head: &Head, floor: Point) -> Result<(), KvError> {
        let mut state = self.state();
        let store = *state.store.get_or_insert(head.store);
        if store != head.store {
            drop(state);
            return Err(self.fail(self.broken(format!("it is another store: {RESTORED}"))));
        }
        let (before, now) = (floor.version, head.point.version);
        if now < before || (now == before && floor != Point::default() && head.point != floor) {
            drop(state);
            return Err(self.gone_back(before, now));
        }
        if head.point.version > state.newest.version {
            state.newest = head.point;
        }
        drop(state);
        head.settings.check(self.accept_single).map_err(|detail| self.broken(detail))
    }

    /// Records a commit of this process.
    pub(crate) fn committed(&self, point: Point) {
        let mut state = self.state();
        if point.version > state.newest.version {
            state.newest = point;
        }
    }

    /// Checks that the history of a server, which is at commit `now`, contains the newest known one.
    ///
    /// # Errors
    /// All further calls fail.
    pub(crate) fn check_history(
        &self,
        floor: Point,
        batch: Option<Id>,
        now: u64,
    ) -> Result<(), KvError> {
        match batch {
            Some(batch) if batch == floor.batch => Ok(()),
            None if now.saturating_sub(floor.version) > COMMITS_KEPT => {
                Err(self.fail(self.broken(format!(
                    "this process was cut off for more than {COMMITS_KEPT} commits, from {} to \
                     {now}, so the histories cannot be compared: restart it",
                    floor.version
                ))))
            }
            _ => Err(self.gone_back(floor.version, floor.version)),
        }
    }

    fn gone_back(&self, before: u64, now: u64) -> KvError {
        self.fail(self.broken(format!(
            "commit {before} is missing, the server is at commit {now} of another history: \
             {RESTORED}"
        )))
    }

    /// All further calls fail with this error, or with that of an earlier failure.
    pub(crate) fn fail(&self, error: KvError) -> KvError {
        self.failed.get_or_init(|| error).clone()
    }

    /// The failure of the store.
    pub(crate) fn check(&self) -> Result<(), CallError> {
        self.failed.get().map_or(Ok(()), |error| Err(CallError::Refused(error.clone())))
    }

    pub(crate) fn broken(&self, detail: impl Into<String>) -> KvError {
        broken(&self.name, detail)
    }

    pub(crate) fn unavailable(&self, detail: String) -> KvError {
        KvError::Unavailable { store: self.name.clone(), detail }
    }

    /// The error for callers of the store: the call was a read, or certainly not executed.
    pub(crate) fn error(&self, error: CallError) -> KvError {
        match error {
            CallError::Refused(error) => error,
            CallError::NoSpace(detail) => KvError::NoSpace {
                store: self.name.clone(),
                detail: format!("{detail}; free space on the disk of the server"),
            },
            CallError::Rejected(detail) | CallError::Failed(detail) => self.unavailable(detail),
        }
    }

    /// Waits for a call, at most for `timeout`.
    pub(crate) async fn call<T>(
        &self,
        timeout: Duration,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, CallError> {
        self.check()?;
        match tokio::time::timeout(timeout, call).await {
            Ok(result) => result.map_err(|error| self.classify(&error)),
            Err(_) => Err(CallError::Failed(format!("no reply in {timeout:?}"))),
        }
    }

    pub(crate) fn classify(&self, error: &Error) -> CallError {
        let Some(reply) = error.as_db_error() else {
            return CallError::Failed(chain(error));
        };
        let code = reply.code();
        let detail = format!("{} ({})", reply.message(), code.code());
        let class = code.code().get(..2).unwrap_or_default();
        if *code == SqlState::DISK_FULL {
            return CallError::NoSpace(detail);
        }
        // Invalid authorization, unknown database, missing privilege, tables of another version.
        if ["28", "3D", "42"].contains(&class) {
            return CallError::Refused(self.broken(detail));
        }
        match reply.parsed_severity() {
            Some(Severity::Error) => CallError::Rejected(detail),
            _ => CallError::Failed(detail),
        }
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let part = next.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = next.source();
    }
    text
}

/// The remedy after a restore.
pub(crate) const RESTORED: &str = "it was restored from an older backup, or a standby was promoted \
     without all acknowledged changes; connect the server that has them, or accept the loss: stop \
     all services of 3FS and start mgmtd and meta once with --postgres-accept-restored";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::head::Settings;

    fn server() -> Server {
        let config = PostgresConfig {
            url: "postgresql://me@host/db".into(),
            schema: "s".into(),
            accept_single: true,
            ..PostgresConfig::default()
        };
        Server::new(&config).unwrap()
    }

    fn head(version: u64, batch: u8) -> Head {
        let settings = Settings {
            fsync: "on".into(),
            full_page_writes: "on".into(),
            synchronous_standby_names: String::new(),
        };
        Head { store: [1; 16], point: Point { version, batch: [batch; 16] }, settings }
    }

    #[test]
    fn a_history_that_went_back_or_differs_fails_the_store() {
        for (now, later) in [(head(4, 1), false), (head(5, 2), false), (head(6, 9), true)] {
            let server = server();
            server.observe(&head(5, 1), server.newest()).unwrap();
            let observed = server.observe(&now, server.newest());
            assert_eq!(observed.is_ok(), later, "{now:?}");
            assert_eq!(server.check().is_ok(), later, "{now:?}");
        }
    }

    #[test]
    fn a_late_reply_is_not_a_history_that_went_back() {
        let server = server();
        let floor = server.newest();
        assert_eq!(server.observe(&head(5, 1), floor), Ok(()));
        assert_eq!(server.observe(&head(4, 1), floor), Ok(()));
        assert_eq!(server.newest().version, 5);
    }

    #[test]
    fn another_store_and_a_former_primary_are_refused() {
        let server = server();
        assert_eq!(server.observe(&head(5, 1), Point::default()), Ok(()));
        assert!(server.check_timeline(2).is_ok());
        assert!(server.check_timeline(1).is_err());
        let other = Head { store: [2; 16], ..head(9, 1) };
        assert!(server.observe(&other, Point::default()).is_err());
    }

    #[test]
    fn the_newest_commit_must_be_in_the_history_of_a_new_server() {
        let floor = Point { version: 5, batch: [1; 16] };
        assert_eq!(server().check_history(floor, Some([1; 16]), 9), Ok(()));
        assert!(server().check_history(floor, Some([2; 16]), 9).is_err());
        let error = |now| server().check_history(floor, None, now).unwrap_err().to_string();
        assert!(error(5 + COMMITS_KEPT).contains("another history"));
        assert!(error(6 + COMMITS_KEPT).contains("cut off"), "its row was removed");
    }
}
