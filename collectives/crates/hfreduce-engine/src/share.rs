//! Resources that the ranks of one user share in this process. A daemon has a share with limits for
//! each user; any other process has one without limits.

use std::sync::{Arc, LazyLock};

use hfreduce_shm::quota::{Account, Charge, Limits, OverLimit};

use crate::priority::PriorityLevels;

/// Resources of one user.
#[derive(Debug, Default)]
pub struct Share {
    /// Priority of chunks. Levels of different users are not compared.
    pub priority_levels: Arc<PriorityLevels>,
    /// Memory of this process.
    memory: Account,
    /// Descriptors of this process.
    descriptors: Account,
    /// Address space of this process, for registered memory.
    addresses: Account,
}

static OF_PROCESS: LazyLock<Arc<Share>> = LazyLock::new(Arc::default);

impl Share {
    /// The share of a process that serves no other users.
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

    /// A charge of no memory yet.
    pub fn memory(&self) -> Charge {
        self.memory.charge()
    }

    /// A charge of no address space yet.
    pub fn addresses(&self) -> Charge {
        self.addresses.charge()
    }

    /// A charge of no descriptors yet.
    pub fn descriptors(&self) -> Charge {
        self.descriptors.charge()
    }

    /// The account of address space.
    pub fn address_account(&self) -> &Account {
        &self.addresses
    }

    /// Charges one descriptor.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn descriptor(&self) -> Result<Charge, OverLimit> {
        let mut charge = self.descriptors();
        charge.set_to(1).map(|()| charge)
    }
}
