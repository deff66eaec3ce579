//! Registration of the store with mgmtd, which precedes serving and garbage collection.

use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::TreeId;
use threefs_kv::{KvError, Store, StoreConfig};
use threefs_mgmtd::{Claim, MetaRegistration, MgmtdClient, MgmtdClientError, MgmtdError};

use crate::ops::{self, OpError};

/// Timeout of one attempt to reach mgmtd, and of one transaction.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Volumes whose epochs are raised in one transaction.
const VOLUMES_AT_ONCE: usize = 64;
/// Attempts between two log lines.
const ATTEMPTS_PER_LINE: u32 = 10;

/// Why the registration failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    #[error(transparent)]
    Refused(#[from] MgmtdError),
    #[error(transparent)]
    Store(#[from] KvError),
}

impl From<OpError> for RegistrationError {
    fn from(error: OpError) -> Self {
        match error {
            OpError::Kv(error) => Self::Store(error),
            other => Self::Store(KvError::bad_row(b"", other.to_string())),
        }
    }
}

/// Registers the store; retries until mgmtd accepts or refuses it.
///
/// # Errors
/// The store was refused, or failed.
pub(crate) async fn register(store: &Store, mgmtd: &MgmtdClient) -> Result<(), RegistrationError> {
    let start = ops::StartRegistration { fresh: TreeId(rand::random()), process: rand::random() };
    let mut registration = store.transact(Deadline::after(ATTEMPT), &start).await?;
    let has_snapshots = store.transact(Deadline::after(ATTEMPT), &ops::HasSnapshots).await?;
    let mut attempts = 0;
    let registered = loop {
        let deadline = Deadline::after(ATTEMPT);
        match mgmtd.register_meta(registration.clone(), has_snapshots, deadline).await {
            Ok(registered) => break registered,
            Err(MgmtdClientError::Refused(MgmtdError::OldTree { .. }))
                if let Some(latest) = started_since(store, &registration).await? =>
            {
                registration = latest;
            }
            Err(MgmtdClientError::Refused(error)) if !error.retryable() => return Err(error.into()),
            Err(error) => {
                if attempts % ATTEMPTS_PER_LINE == 0 {
                    tracing::warn!(%error, "waiting for mgmtd before serving metadata");
                }
                attempts += 1;
                tokio::time::sleep(PAUSE).await;
            }
        }
    };
    if registration.claim != Claim::Continues {
        // Before the claim is cleared: an interrupted start repeats it.
        raise_epochs(store, mgmtd).await?;
    }
    let finish = ops::FinishRegistration { registered };
    store.transact(Deadline::after(ATTEMPT), &finish).await?;
    tracing::info!(tree = %registration.tree, generation = registered.generation, "registered");
    Ok(())
}

/// Raises the epochs of a tree that was restored to those that the lost one may have used.
async fn raise_epochs(store: &Store, mgmtd: &MgmtdClient) -> Result<(), RegistrationError> {
    let mut attempts = 0;
    let fences = loop {
        match mgmtd.fences(Deadline::after(ATTEMPT)).await {
            Ok(fences) => break fences,
            Err(error) if attempts % ATTEMPTS_PER_LINE == 0 => {
                tracing::warn!(%error, "waiting for mgmtd's fences of volumes, before serving metadata");
            }
            Err(_) => {}
        }
        attempts += 1;
        tokio::time::sleep(PAUSE).await;
    };
    for part in fences.chunks(VOLUMES_AT_ONCE) {
        store.transact(Deadline::after(ATTEMPT), &ops::RaiseEpochs(part)).await?;
    }
    Ok(())
}

/// The registration of a service that has started over the same store since this one did: mgmtd
/// knows the store by it, if the store is not an old copy.
async fn started_since(
    store: &Store,
    registration: &MetaRegistration,
) -> Result<Option<MetaRegistration>, RegistrationError> {
    let latest = store.transact(Deadline::after(ATTEMPT), &ops::LatestRegistration).await?;
    Ok(latest.filter(|latest| latest.process != registration.process))
}

/// Marks a store, which may be empty, to replace the registered store of its cluster at the next
/// start of the service.
///
/// # Errors
/// The store cannot be opened or written.
pub fn adopt(store: StoreConfig) -> BoxFuture<'static, Result<(), KvError>> {
    Box::pin(async move {
        let store = Store::open(store).await?;
        store.transact(Deadline::after(ATTEMPT), &ops::WriteClaim(Claim::Adopted)).await.map_err(
            |error| match error {
                OpError::Kv(error) => error,
                other => KvError::bad_row(b"", other.to_string()),
            },
        )
    })
}
