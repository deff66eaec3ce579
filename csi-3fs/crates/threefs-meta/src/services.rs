//! The view that a service has of the other services over its store.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fabric::boot_instant::BootInstant;

use crate::ops::OpError;
use crate::rows::CollectorRow;

/// This service among those over the store.
#[derive(Debug)]
pub(crate) struct Services {
    /// No other process can have the store open.
    pub alone: bool,
    collector: Mutex<Option<CollectorRow>>,
    /// When this service last learned that another one is gone.
    departure: Mutex<Option<BootInstant>>,
}

impl Services {
    pub(crate) fn new(alone: bool) -> Self {
        Self { alone, collector: Mutex::default(), departure: Mutex::default() }
    }

    /// The epoch of this service if it was the collector when it last looked.
    pub(crate) fn collector(&self) -> Result<CollectorRow, OpError> {
        let collector = *self.collector.lock().unwrap_or_else(PoisonError::into_inner);
        collector.ok_or(OpError::NotCollector)
    }

    /// Stores the role of this service after a look; whether it is new.
    pub(crate) fn set_collector(&self, row: Option<CollectorRow>) -> bool {
        let mut collector = self.collector.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = row.is_some() && *collector != row;
        *collector = row;
        changed
    }

    /// Another service is gone: its clients report their open files to others.
    pub(crate) fn note_departure(&self) {
        let now = BootInstant::now();
        *self.departure.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// Whether another service was lost less than `wait` ago.
    pub(crate) fn departed_within(&self, wait: Duration) -> bool {
        let departure = *self.departure.lock().unwrap_or_else(PoisonError::into_inner);
        departure.is_some_and(|at| BootInstant::now().since(at) < wait)
    }
}
