//! Listings of directories.
//!
//! A place in a listing is a number that counts entries. What is listed is in the order of names, so
//! a listing goes on behind the last name, whatever is removed meanwhile. A daemon that takes over
//! lists from the beginning and counts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_meta::identity::READ;
use threefs_meta::{At, Entry, Inode, MetaQuery, MetaReply};

use crate::attributes::kernel_attributes;
use crate::calls::unexpected;
use crate::daemon::{Call, Daemon};
use crate::names::entry_mode;
use crate::wire::{self, Body, Fields, opcode};

/// Entries that are asked for at once.
const PAGE: u32 = 512;
/// `.` and `..` come first; the kernel knows what they are.
const DOTS: [&[u8]; 2] = [b".", b".."];

/// Open directories.
#[derive(Default)]
pub(crate) struct Listings {
    open: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Listing>>>>,
    next: AtomicU64,
}

/// A window over the entries of a directory.
#[derive(Default)]
pub(crate) struct Listing {
    /// Number of the first entry in the window.
    first: u64,
    entries: Vec<(Entry, Option<Inode>)>,
    /// Nothing comes behind the window.
    complete: bool,
}

impl Listings {
    fn begin(&self) -> u64 {
        let number = self.next.fetch_add(1, Relaxed) + 1;
        self.of(number);
        number
    }

    fn of(&self, number: u64) -> Arc<tokio::sync::Mutex<Listing>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(open.entry(number).or_default())
    }

    fn end(&self, number: u64) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }
}

impl Daemon {
    pub(crate) async fn open_directory(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let id = self.inode(call.request.node);
        // Not held: a removed directory is empty.
        let query = MetaQuery::Stat { at: At::inode(id), follow: false };
        let reply = self.query(call, &format!("open directory {id}"), query).await?;
        let inode = crate::calls::inode_of(reply)?;
        if !inode.is_directory() {
            return Err(Errno::NOTDIR);
        }
        if !call.identity().allowed(&inode, READ) {
            return Err(Errno::ACCESS);
        }
        Ok(wire::opened(Body::default(), self.handle(self.listings.begin()), 0))
    }

    pub(crate) fn release_directory(&self, call: &mut Call<'_>) -> Body {
        if let Some(handle) = Fields(&call.request.body).u64() {
            self.listings.end(handle);
            self.listings.end(handle & 0xffff_ffff);
        }
        Body::default()
    }

    pub(crate) async fn read_directory(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let room = fields.u32().ok_or(Errno::INVAL)? as usize;
        let plus = call.request.opcode == opcode::READDIRPLUS;
        let id = self.inode(call.request.node);
        let number = if self.is_former(handle) { handle } else { handle & 0xffff_ffff };
        let listing = self.listings.of(number);
        let mut listing = listing.lock().await;
        let mut body = Body::default();
        let mut at = offset;
        while let Some(name) = DOTS.get(usize::try_from(at).unwrap_or(usize::MAX)) {
            if body.0.len() + wire::directory_entry_bytes(name, plus) > room {
                return Ok(body);
            }
            let mode = entry_mode(threefs_meta::EntryKind::Directory);
            if plus {
                // Number 0: it takes no part in the kernel's count of what it knows.
                body = body.zeros(128);
            }
            at += 1;
            body = wire::directory_entry(body, id.0, at, mode, name);
        }
        loop {
            let wanted = at - DOTS.len() as u64;
            let Some((entry, inode)) = self.at(call, &mut listing, id, wanted).await? else {
                return Ok(body);
            };
            let name = entry.name.as_bytes();
            if body.0.len() + wire::directory_entry_bytes(name, plus) > room {
                return Ok(body);
            }
            at += 1;
            if plus {
                body = match inode {
                    Some(inode) => {
                        let open = self.files.get(inode.id);
                        let attributes = kernel_attributes(inode, open.as_deref());
                        wire::entry(body, inode.id.0, &attributes, self.valid)
                    }
                    // It vanished meanwhile, or nobody could say: the kernel looks it up itself.
                    None => body.zeros(128),
                };
            }
            body = wire::directory_entry(body, entry.inode.0, at, entry_mode(entry.kind), name);
        }
    }

    /// Entry number `wanted`, if there are so many.
    async fn at<'a>(
        &self,
        call: &Call<'_>,
        listing: &'a mut Listing,
        directory: InodeId,
        wanted: u64,
    ) -> Result<Option<&'a (Entry, Option<Inode>)>, Errno> {
        if wanted == 0 || wanted < listing.first {
            // From the beginning, with what is there now.
            *listing = Listing::default();
        }
        while wanted >= listing.first + listing.entries.len() as u64 {
            if listing.complete {
                return Ok(None);
            }
            let after = listing.entries.last().map(|(entry, _)| entry.name.clone());
            let (entries, more) = self.page(call, directory, after.unwrap_or_default()).await?;
            listing.first += listing.entries.len() as u64;
            listing.entries = entries;
            listing.complete = !more;
            if listing.entries.is_empty() {
                return Ok(None);
            }
        }
        Ok(listing.entries.get((wanted - listing.first) as usize))
    }

    async fn page(
        &self,
        call: &Call<'_>,
        directory: InodeId,
        after: String,
    ) -> Result<(Vec<(Entry, Option<Inode>)>, bool), Errno> {
        let what = format!("list {directory}");
        let list = MetaQuery::List { at: At::inode(directory), after, limit: PAGE };
        let (entries, more) = match self.query_as_root(call, &what, list).await {
            Ok(MetaReply::Page { entries, more }) => (entries, more),
            Ok(other) => return Err(unexpected(&other)),
            // A directory that is gone has no entries.
            Err(Errno::STALE) => return Ok((Vec::new(), false)),
            Err(error) => return Err(error),
        };
        if entries.is_empty() {
            return Ok((Vec::new(), false));
        }
        let places = entries.iter().map(|entry| At::inode(entry.inode)).collect();
        let query = MetaQuery::StatMany { at: places };
        let inodes = match self.query_as_root(call, &what, query).await? {
            MetaReply::Inodes(inodes) if inodes.len() == entries.len() => inodes,
            other => return Err(unexpected(&other)),
        };
        let known = entries.into_iter().zip(inodes).map(|(entry, inode)| (entry, inode.ok()));
        Ok((known.collect(), more))
    }
}
