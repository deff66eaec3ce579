//! Open directories and the window of entries that each has loaded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use threefs_meta::{Entry, Inode};

/// Open directories.
#[derive(Default)]
pub(crate) struct Listings {
    listings: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Listing>>>>,
    next: AtomicU64,
}

/// A window over the entries of a directory.
#[derive(Default)]
pub(crate) struct Listing {
    /// Number of the first entry in the window.
    pub first: u64,
    pub entries: Vec<(Entry, Option<Inode>)>,
    /// No entries follow the window.
    pub complete: bool,
}

impl Listings {
    pub(crate) fn open(&self) -> u64 {
        let number = self.next.fetch_add(1, Relaxed) + 1;
        self.get(number);
        number
    }

    pub(crate) fn get(&self, number: u64) -> Arc<tokio::sync::Mutex<Listing>> {
        let mut listings = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(listings.entry(number).or_default())
    }

    pub(crate) fn close(&self, number: u64) {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }
}
