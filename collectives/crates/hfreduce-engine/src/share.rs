//! What the ranks that one user has in this process share. A daemon has a share for each user, with
//! limits; any other process has one without.

use std::sync::{Arc, LazyLock};

use hfreduce_shm::quota::{Account, Charge, Limits, OverLimit};

use crate::driver::priority::PriorityLevels;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Share {
    /// Whose chunks go first. Levels of different users are not compared: each chooses its own.
    pub priority_levels: Arc<PriorityLevels>,
    /// Memory of this process that a user's ranks may cause to be used.
    memory: Account,
    /// Descriptors of this process.
    descriptors: Account,
    /// Addresses of this process, for registered memory.
    addresses: Account,
}

static OF_PROCESS: LazyLock<Arc<Share>> = LazyLock::new(Arc::default);

impl Share {
    /// The share of a process that serves nobody else's ranks.
    pub fn of_process() -> Arc<Self> {
        OF_PROCESS.clone()
    }

    /// The share of a user of a daemon.
    pub fn of_user(user: u32, limits: &Limits) -> Arc<Self> {
        let Limits { memory, descriptors, addresses } = limits;
        Arc::new(Self {
            priority_levels: Arc::default(),
            memory: Account::new(user, memory.clone()),
            descriptors: Account::new(user, descriptors.clone()),
            addresses: Account::new(user, addresses.clone()),
        })
    }

    /// No memory yet.
    pub fn memory(&self) -> Charge {
        self.memory.charge()
    }

    /// No addresses yet.
    pub fn addresses(&self) -> Charge {
        self.addresses.charge()
    }

    /// No descriptor yet.
    pub fn descriptors(&self) -> Charge {
        self.descriptors.charge()
    }

    /// The account that registered memory is charged to, in addresses.
    pub fn address_account(&self) -> &Account {
        &self.addresses
    }

    /// One descriptor.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn descriptor(&self) -> Result<Charge, OverLimit> {
        let mut one = self.descriptors();
        one.set_to(1).map(|()| one)
    }
}
