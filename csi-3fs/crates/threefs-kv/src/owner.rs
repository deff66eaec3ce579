//! Owner of a store: the cluster whose services may use it, recognized by its keys.
//!
//! The row [`OWNER_ROW`] has the fingerprints of the cluster's keys. A service checks it before it
//! writes or serves anything, so two clusters with the same folder or prefix do not mix. One service,
//! the primary or the collector, writes its key ring into the row, so the row follows a key rotation:
//! services of adjacent steps of a rotation have a key in common.
//!
//! | part | responsibility |
//! |---|---|
//! | `owner_row` | pure: the row's bytes |
//! | `owner_error` | why a service refuses a store |
//! | `rekey` | replacement by an operator |

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fabric::auth::keys::Keys;
use fabric::deadline::Deadline;

use crate::owner_error::OwnerError;
use crate::owner_row::{self, Fingerprint, Fingerprints};
use crate::{KeyRange, KvError, Operation, Store, Transaction, rows};

/// Key of the row, in the stores of all services.
pub const OWNER_ROW: &[u8] = b"OWNR";
/// Timeout of a transaction.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The cluster of a service, as the owner of its store. Clones share their state.
#[derive(Clone)]
pub struct Owner {
    /// `mgmtd` or `meta`.
    service: &'static str,
    /// Key of the row with the cluster's id.
    cluster_row: &'static [u8],
    /// The store's folder or address.
    store: String,
    keys: Keys,
    /// Fingerprints by which the row has accepted this process: its key file may have been replaced
    /// since.
    accepted: Arc<Mutex<Fingerprints>>,
}

/// Owners of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rekeyed {
    /// Fingerprints of the former owner; none if the row was absent or invalid.
    pub before: Fingerprints,
    /// Fingerprints of the new one.
    pub after: Fingerprints,
}

/// Result of [`Owner::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// This cluster owns the store.
    Owned,
    /// The store has rows of a version that wrote no owner, of this cluster if it is known. It must
    /// not be used before [`Owner::adopt`].
    Unowned(Option<u128>),
}

impl Owner {
    /// The owner of the store of a service, whose folder or address is `store`.
    pub fn new(
        service: &'static str,
        cluster_row: &'static [u8],
        keys: Keys,
        store: String,
    ) -> Self {
        Self { service, cluster_row, store, keys, accepted: Arc::default() }
    }

    /// Checks the owner of a store, before anything else is done with it. The first service of an
    /// empty store makes its cluster the owner.
    ///
    /// # Errors
    /// [`KvError::Owner`] if another cluster owns it.
    pub async fn enter(&self, store: &Store) -> Result<Entry, KvError> {
        self.update(store, Step::Enter).await
    }

    /// Makes this cluster the owner of a store without an owner.
    ///
    /// # Errors
    /// [`KvError::Owner`] if another cluster owns it by now.
    pub async fn adopt(&self, store: &Store) -> Result<(), KvError> {
        self.update(store, Step::Adopt).await.map(drop)
    }

    /// Checks the owner again, for a service that runs. `writes`: the service is the one that lets
    /// the row follow the key file.
    ///
    /// # Errors
    /// [`KvError::Owner`] if another cluster owns the store by now. Other errors are logged: the next
    /// call repeats the check.
    pub async fn keep(&self, store: &Store, writes: bool) -> Result<(), KvError> {
        match self.update(store, Step::Keep { writes }).await {
            Err(error @ KvError::Owner(_)) => Err(error),
            Err(error) => {
                tracing::debug!(%error, "the owner of the store could not be checked");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Makes this cluster the owner of a store, also if another one owns it.
    pub(crate) async fn replace(&self, store: &Store) -> Result<Rekeyed, KvError> {
        store.transact(Deadline::after(TIMEOUT), &Rekey(self.current())).await
    }

    /// Checks the owner as part of a transaction, which conflicts with a change of the owner.
    ///
    /// # Errors
    /// [`KvError::Owner`] if another cluster owns the store by now.
    pub async fn check(&self, txn: &mut Transaction) -> Result<(), KvError> {
        self.read(txn).await.map(drop)
    }

    /// The error of a service that would adopt a store although `peer` belongs to another cluster.
    pub fn other_cluster(&self, cluster: u128, peer: String, peer_cluster: u128) -> KvError {
        let (store, service) = (self.store.clone(), self.service);
        refused(OwnerError::OtherCluster { store, service, cluster, peer, peer_cluster })
    }

    /// Key of the row with the cluster's id.
    pub(crate) fn cluster_row(&self) -> &'static [u8] {
        self.cluster_row
    }

    /// Fingerprints of the key file.
    fn current(&self) -> Fingerprints {
        Fingerprint::of(&self.keys.current())
    }

    /// The fingerprints in the owner's row.
    ///
    /// # Errors
    /// It is invalid, or names another cluster.
    pub(crate) fn verify(
        &self,
        row: &[u8],
        cluster: Option<&[u8]>,
    ) -> Result<Fingerprints, KvError> {
        let (store, service) = (self.store.clone(), self.service);
        let owners = owner_row::decode(row).map_err(|detail| {
            refused(OwnerError::Invalid { store: store.clone(), service, detail })
        })?;
        let ours = self.current();
        let accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        if ours.union(&accepted).any(|key| owners.contains(key)) {
            return Ok(owners);
        }
        let cluster = cluster.and_then(|value| rows::decode(self.cluster_row, value).ok());
        Err(refused(OwnerError::OtherKey { store, service, cluster, owners, ours }))
    }

    /// The row of the owner, verified.
    async fn read(&self, txn: &mut Transaction) -> Result<Option<Fingerprints>, KvError> {
        let Some(row) = txn.get(OWNER_ROW).await? else { return Ok(None) };
        let cluster = txn.get(self.cluster_row).await?;
        self.verify(&row, cluster.as_deref()).map(Some)
    }

    async fn update(&self, store: &Store, step: Step) -> Result<Entry, KvError> {
        let update = Update { owner: self, step };
        let updated = store.transact(Deadline::after(TIMEOUT), &update).await?;
        let (owners, ours) = match updated {
            Updated::Unowned(cluster) => return Ok(Entry::Unowned(cluster)),
            Updated::Unchanged { owners, ours } => (owners, ours),
            Updated::Written(ours) => {
                let keys = Fingerprint::list(&ours);
                tracing::info!(store = self.store, keys, "this cluster owns the store");
                (ours.clone(), ours)
            }
        };
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.extend(ours);
        accepted.retain(|key| owners.contains(key));
        Ok(Entry::Owned)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Enter,
    Adopt,
    Keep { writes: bool },
}

/// A step of an owner.
struct Update<'a> {
    owner: &'a Owner,
    step: Step,
}

enum Updated {
    Unowned(Option<u128>),
    Unchanged { owners: Fingerprints, ours: Fingerprints },
    Written(Fingerprints),
}

impl Operation for Update<'_> {
    type Output = Updated;
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<Updated, KvError> {
        let ours = self.owner.current();
        let writes = match self.owner.read(txn).await? {
            Some(owners) if self.step != (Step::Keep { writes: true }) || owners == ours => {
                return Ok(Updated::Unchanged { owners, ours });
            }
            Some(_) => true,
            None => match self.step {
                Step::Enter => is_empty(txn).await?,
                Step::Adopt => true,
                Step::Keep { writes } => writes,
            },
        };
        if !writes {
            return Ok(Updated::Unowned(rows::read(txn, self.owner.cluster_row).await?));
        }
        txn.set(OWNER_ROW, owner_row::encode(&ours));
        Ok(Updated::Written(ours))
    }
}

struct Rekey(Fingerprints);

impl Operation for Rekey {
    type Output = Rekeyed;
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<Rekeyed, KvError> {
        let before = txn.get(OWNER_ROW).await?;
        let before = before.and_then(|row| owner_row::decode(&row).ok()).unwrap_or_default();
        txn.set(OWNER_ROW, owner_row::encode(&self.0));
        Ok(Rekeyed { before, after: self.0.clone() })
    }
}

fn refused(error: OwnerError) -> KvError {
    KvError::Owner(Box::new(error))
}

/// Whether the store has no row. Conflicts with the first write of any row.
async fn is_empty(txn: &mut Transaction) -> Result<bool, KvError> {
    Ok(txn.range(&KeyRange::new([1], [0xff]), 1).await?.is_empty())
}
