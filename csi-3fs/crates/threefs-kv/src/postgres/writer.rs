//! Writer: a session that holds the lock of the store while a batch is checked and applied.

use std::time::Duration;

use tokio_postgres::{Error, Row, Statement};

use super::head::{Head, Id, Point, signed, unsigned};
use super::plan::{Facts, Questions};
use super::server::{CallError, Server};
use super::session::{Session, Value};
use super::statements::Statements;
use super::written;
use crate::guard::Guard;
use crate::layer::Write;

/// Timeout of the reads under the lock, and of the writes with the standby's acknowledgement.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A process that stops while it holds the lock loses it after this time.
const SETTINGS: &str = "SET idle_in_transaction_session_timeout = '3s'";

pub(crate) struct Writer {
    session: Session,
    statements: Statements,
}

impl Writer {
    /// Connects to the server that accepts writes.
    pub(crate) async fn connect(server: &Server) -> Result<Self, CallError> {
        let session = Session::connect(server).await?;
        session.check_history(server).await?;
        let prepare = async {
            session.client.batch_execute(SETTINGS).await?;
            Statements::prepare(&session.client, &server.schema).await
        };
        let statements = server.call(CALL_TIMEOUT, prepare).await?;
        Ok(Self { session, statements })
    }

    /// Starts a transaction, locks the store, and reads what a batch depends on.
    pub(crate) async fn lock_and_read(
        &self,
        server: &Server,
        questions: &Questions,
    ) -> Result<(Head, Facts), CallError> {
        let floor = server.newest();
        let (client, statements) = (&self.session.client, &self.statements);
        let rows: Vec<&[u8]> = questions.rows.iter().map(Vec::as_slice).collect();
        let counters: Vec<&[u8]> = questions.counters.iter().map(Vec::as_slice).collect();
        let (mut first, mut last, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for guard in &questions.ranges {
            if let Guard::Range { range, revision } = guard {
                first.push(range.start.as_slice());
                last.push(range.end.as_slice());
                seen.push(signed(*revision));
            }
        }
        let (rows_of, counters_of): ([Value<'_>; 1], [Value<'_>; 1]) = ([&rows], [&counters]);
        let ranges: [Value<'_>; 3] = [&first, &last, &seen];
        // One round trip: the server executes them in this order, the reads after the lock.
        let read = async {
            tokio::try_join!(
                biased;
                client.batch_execute("START TRANSACTION ISOLATION LEVEL READ COMMITTED"),
                client.query_one(&statements.lock, &[]),
                self.query_if(!rows.is_empty(), &statements.versions, &rows_of),
                self.query_if(!counters.is_empty(), &statements.counters, &counters_of),
                self.query_if(!first.is_empty(), &statements.violated, &ranges),
            )
        };
        let (_, head, versions, values, violated) = server.call(CALL_TIMEOUT, read).await?;
        let parse = || {
            let mut facts = Facts::default();
            for row in &versions {
                facts.versions.insert(row.try_get(0)?, unsigned(row.try_get(1)?));
            }
            for row in &values {
                facts.counters.insert(row.try_get(0)?, row.try_get(1)?);
            }
            for row in &violated {
                let number: i64 = row.try_get(0)?;
                let at = usize::try_from(number - 1).unwrap_or(usize::MAX);
                facts.violated.extend(questions.ranges.iter().nth(at).cloned());
            }
            Ok((Head::parse(&head)?, facts))
        };
        let (head, facts) = parse().map_err(|error| server.classify(&error))?;
        server.observe(&head, floor).map_err(CallError::Refused)?;
        Ok((head, facts))
    }

    async fn query_if(
        &self,
        needed: bool,
        statement: &Statement,
        values: &[Value<'_>],
    ) -> Result<Vec<Row>, Error> {
        match needed {
            true => self.session.client.query(statement, values).await,
            false => Ok(Vec::new()),
        }
    }

    /// Writes a batch under the lock and commits it. Adds the removed rows of cleared ranges to
    /// `keys`, the rows that it writes.
    ///
    /// # Errors
    /// [`CallError::Failed`] if it may have been committed.
    pub(crate) async fn apply(
        &self,
        server: &Server,
        point: Point,
        writes: Vec<Write>,
        keys: &mut Vec<Vec<u8>>,
    ) -> Result<(), CallError> {
        let (client, statements) = (&self.session.client, &self.statements);
        let (mut put_keys, mut put_values, mut deleted) = (Vec::new(), Vec::new(), Vec::new());
        for write in &writes {
            match write {
                Write::Put { key, value } => {
                    put_keys.push(key.as_slice());
                    put_values.push(value.as_slice());
                }
                Write::Delete { key } => deleted.push(key.as_slice()),
                Write::DeleteRange { range } => {
                    let bounds: [Value<'_>; 2] = [&range.start, &range.end];
                    let delete = client.query(&statements.delete_range, &bounds);
                    let rows = server.call(CALL_TIMEOUT, delete).await?;
                    keys.extend(rows.iter().filter_map(|row| row.try_get(0).ok()));
                }
            }
        }
        let version = signed(point.version);
        let (batch, hashes) = (point.batch.as_slice(), written::hashes(keys));
        self.session.take_warning();
        let put: [Value<'_>; 3] = [&put_keys, &put_values, &version];
        let record: [Value<'_>; 3] = [&version, &batch, &hashes];
        let (removed, numbered): ([Value<'_>; 1], [Value<'_>; 1]) = ([&deleted], [&version]);
        let advanced: [Value<'_>; 2] = [&version, &batch];
        // If one of them fails, the transaction is aborted and COMMIT rolls it back.
        let apply = async {
            tokio::try_join!(
                biased;
                self.query_if(!deleted.is_empty(), &statements.delete, &removed),
                self.query_if(!put_keys.is_empty(), &statements.put, &put),
                client.execute(&statements.record, &record),
                client.execute(&statements.forget, &numbered),
                client.execute(&statements.advance, &advanced),
                client.batch_execute("COMMIT"),
            )
        };
        server.call(CALL_TIMEOUT, apply).await?;
        self.acknowledged()
    }

    /// Ends the transaction without writes.
    pub(crate) async fn roll_back(&self, server: &Server) -> Result<(), CallError> {
        server.call(CALL_TIMEOUT, self.session.client.batch_execute("ROLLBACK")).await
    }

    /// Whether a batch was committed, as the holder of the lock. If so, a standby has it, too.
    pub(crate) async fn find(&self, server: &Server, point: Point) -> Result<bool, CallError> {
        self.lock_and_read(server, &Questions::default()).await?;
        let (client, statements) = (&self.session.client, &self.statements);
        let version = signed(point.version);
        let numbered: [Value<'_>; 1] = [&version];
        let find = client.query_opt(&statements.find, &numbered);
        let row = server.call(CALL_TIMEOUT, find).await?;
        let batch: Option<&[u8]> = row.as_ref().and_then(|row| row.try_get(0).ok());
        if batch.and_then(|id| Id::try_from(id).ok()) != Some(point.batch) {
            self.roll_back(server).await?;
            return Ok(false);
        }
        self.session.take_warning();
        let confirm = async {
            tokio::try_join!(
                biased;
                client.execute(&statements.touch, &[]),
                client.batch_execute("COMMIT")
            )
        };
        server.call(CALL_TIMEOUT, confirm).await?;
        self.acknowledged()?;
        Ok(true)
    }

    /// A wait for the standby that an administrator or a signal has cancelled ends with a warning
    /// and a commit that only the primary has.
    fn acknowledged(&self) -> Result<(), CallError> {
        match self.session.take_warning() {
            false => Ok(()),
            true => Err(CallError::Failed("the wait for the standby was cancelled".into())),
        }
    }
}
