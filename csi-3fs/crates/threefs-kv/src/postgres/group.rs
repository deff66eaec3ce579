//! Group: the transactions that read one snapshot, and the session that serves their reads.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_postgres::Statement;

use super::head::{Head, signed, unsigned};
use super::server::{CallError, Server};
use super::session::{Session, Value};
use crate::{KeyRange, KvError};

/// A snapshot keeps PostgreSQL from removing old versions of rows, and a session from other
/// transactions, so its age is bounded.
const AGE_MAX: Duration = Duration::from_secs(5);
/// Time without a reply after which a read fails.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of rows that are read by key in one statement.
const KEYS_MAX: usize = 256;

/// Key, value, and the version that wrote the row.
pub(crate) type RowAt = (Vec<u8>, Vec<u8>, u64);
type Reply<T> = oneshot::Sender<Result<T, KvError>>;

/// A read of a transaction.
#[derive(Debug)]
pub(crate) enum Request {
    Row { key: Vec<u8>, reply: Reply<Option<(Vec<u8>, u64)>> },
    Range { range: KeyRange, limit: usize, reply: Reply<Vec<RowAt>> },
}

/// A session for snapshots.
pub(crate) struct Reader {
    session: Session,
    head: Statement,
    rows: Statement,
    range: Statement,
}

impl Reader {
    async fn connect(server: &Server) -> Result<Self, CallError> {
        let session = Session::connect(server).await?;
        session.check_history(server).await?;
        let (client, schema) = (&session.client, &server.schema);
        let (head, rows, range) = (
            format!("SELECT {} FROM {schema}.head", Head::COLUMNS),
            format!("SELECT key, value, version FROM {schema}.rows WHERE key = ANY ($1::bytea[])"),
            format!(
                "SELECT key, value, version FROM {schema}.rows \
                 WHERE key >= $1::bytea AND key < $2::bytea ORDER BY key LIMIT $3::int8"
            ),
        );
        let prepare = async {
            tokio::try_join!(client.prepare(&head), client.prepare(&rows), client.prepare(&range))
        };
        let (head, rows, range) = server.call(TIMEOUT, prepare).await?;
        Ok(Self { session, head, rows, range })
    }

    /// Starts a snapshot; returns its version.
    async fn start(&self, server: &Server) -> Result<u64, CallError> {
        let floor = server.newest();
        let started = async {
            tokio::try_join!(
                biased;
                self.session
                    .client
                    .batch_execute("START TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"),
                self.session.client.query_one(&self.head, &[]),
            )
        };
        let (_, row) = server.call(TIMEOUT, started).await?;
        let head = Head::parse(&row).map_err(|error| server.classify(&error))?;
        server.observe(&head, floor).map_err(CallError::Refused)?;
        Ok(head.point.version)
    }

    async fn rows(
        &self,
        server: &Server,
        keys: &[&[u8]],
    ) -> Result<HashMap<Vec<u8>, (Vec<u8>, u64)>, CallError> {
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let values: [Value<'_>; 1] = [&keys];
        let found = self.session.client.query(&self.rows, &values);
        let found = server.call(TIMEOUT, found).await?;
        let rows = found
            .iter()
            .map(|row| Ok((row.try_get(0)?, (row.try_get(1)?, unsigned(row.try_get(2)?)))));
        rows.collect::<Result<_, _>>().map_err(|error| server.classify(&error))
    }

    async fn range(
        &self,
        server: &Server,
        range: &KeyRange,
        limit: usize,
    ) -> Result<Vec<RowAt>, CallError> {
        let limit = signed(limit as u64);
        let values: [Value<'_>; 3] = [&range.start, &range.end, &limit];
        let found = server.call(TIMEOUT, self.session.client.query(&self.range, &values)).await?;
        let rows = found
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, unsigned(row.try_get(2)?))));
        rows.collect::<Result<_, _>>().map_err(|error| server.classify(&error))
    }
}

/// A snapshot in use.
pub(crate) struct Group {
    reader: Reader,
    version: u64,
    requests: mpsc::Receiver<Request>,
}

impl Group {
    /// Starts a snapshot in a session. One that exists may have ended since: a new one is tried
    /// then.
    pub(crate) async fn start(
        server: &Server,
        reader: Option<Reader>,
        requests: mpsc::Receiver<Request>,
    ) -> Result<Self, CallError> {
        if let Some(reader) = reader {
            match reader.start(server).await {
                Ok(version) => return Ok(Self { reader, version, requests }),
                Err(CallError::Refused(error)) => return Err(CallError::Refused(error)),
                Err(error) => tracing::debug!(?error, "a session has ended"),
            }
        }
        let reader = Reader::connect(server).await?;
        let version = reader.start(server).await?;
        Ok(Self { reader, version, requests })
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Serves reads until the last transaction of the group has ended; returns the session, if it
    /// can be used again.
    pub(crate) async fn run(mut self, server: &Server, started: Instant) -> Option<Reader> {
        let mut batch = Vec::new();
        loop {
            let received = self.requests.recv_many(&mut batch, KEYS_MAX);
            match tokio::time::timeout_at(started + AGE_MAX, received).await {
                Ok(1..) => {}
                // Further reads find a closed channel: the snapshot is too old.
                Ok(0) | Err(_) => break,
            }
            if let Err(error) = self.serve(server, &mut batch).await {
                let error = server.error(error);
                batch.drain(..).for_each(|request| request.fail(error.clone()));
                self.requests.close();
                while let Ok(request) = self.requests.try_recv() {
                    request.fail(error.clone());
                }
                return None;
            }
        }
        self.requests.close();
        let too_old = KvError::TooOld { version: self.version };
        while let Ok(request) = self.requests.try_recv() {
            request.fail(too_old.clone());
        }
        let ended = server.call(TIMEOUT, self.reader.session.client.batch_execute("COMMIT"));
        ended.await.ok().map(|()| self.reader)
    }

    async fn serve(&self, server: &Server, batch: &mut Vec<Request>) -> Result<(), CallError> {
        let keys = batch.iter().filter_map(|request| match request {
            Request::Row { key, .. } => Some(key.as_slice()),
            Request::Range { .. } => None,
        });
        let keys: Vec<_> = keys.collect();
        let rows = self.reader.rows(server, &keys).await?;
        // What is not answered when a read fails stays in the batch.
        while let Some(request) = batch.pop() {
            match request {
                Request::Row { key, reply } => {
                    let _ = reply.send(Ok(rows.get(&key).cloned()));
                }
                Request::Range { range, limit, reply } => {
                    let read = self.reader.range(server, &range, limit).await;
                    let failed = read.as_ref().err().cloned();
                    let _ = reply.send(read.map_err(|error| server.error(error)));
                    if let Some(error) = failed {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Request {
    fn fail(self, error: KvError) {
        match self {
            Self::Row { reply, .. } => drop(reply.send(Err(error))),
            Self::Range { reply, .. } => drop(reply.send(Err(error))),
        }
    }
}
