//! Directory listings.
//!
//! An offset in a listing counts entries. Entries are listed in the order of their names, so a
//! listing continues after the last name even if entries are removed meanwhile. A daemon that takes
//! over lists from the start and counts.

use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_meta::permission::READ;
use threefs_meta::{At, Entry, Inode, MetaQuery, MetaReply};

use super::attributes::kind_bits;
use crate::daemon::{Call, Daemon, inode_of, unexpected};
use crate::listings::Listing;
use crate::wire::{self, Body, Fields, opcode};

/// Entries per query.
const PAGE: u32 = 512;
/// `.` and `..` come first; the kernel resolves them itself.
const DOTS: [&[u8]; 2] = [b".", b".."];

impl Daemon {
    pub(crate) async fn open_directory(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let id = self.inode(call.request.node);
        // Not kept open: a removed directory is empty.
        let query = MetaQuery::Stat { at: At::inode(id), follow: false };
        let reply = self.query(call, &format!("open directory {id}"), query).await?;
        let inode = inode_of(reply)?;
        if !inode.is_directory() {
            return Err(Errno::NOTDIR);
        }
        if !call.identity().allows(&inode, READ) {
            return Err(Errno::ACCESS);
        }
        Ok(wire::opened(Body::default(), self.handle(self.listings.open()), 0))
    }

    pub(crate) fn release_directory(&self, call: &mut Call<'_>) -> Body {
        if let Some(handle) = Fields(&call.request.body).u64() {
            self.listings.close(handle);
            self.listings.close(handle & 0xffff_ffff);
        }
        Body::default()
    }

    pub(crate) async fn read_directory(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)? as usize;
        let plus = call.request.opcode == opcode::READDIRPLUS;
        let id = self.inode(call.request.node);
        let listing_number = if self.is_former(handle) { handle } else { handle & 0xffff_ffff };
        let listing = self.listings.get(listing_number);
        let mut listing = listing.lock().await;
        let mut body = Body::default();
        let mut at = offset;
        while let Some(name) = DOTS.get(usize::try_from(at).unwrap_or(usize::MAX)) {
            if body.0.len() + wire::directory_entry_bytes(name, plus) > size {
                return Ok(body);
            }
            let mode = kind_bits(threefs_meta::EntryKind::Directory);
            if plus {
                // Node number 0: the kernel does not count a lookup.
                body = body.zeros(128);
            }
            at += 1;
            body = wire::directory_entry(body, id.0, at, mode, name);
        }
        loop {
            let number = at - DOTS.len() as u64;
            let Some((entry, inode)) = self.entry_at(call, &mut listing, id, number).await? else {
                return Ok(body);
            };
            let name = entry.name.as_bytes();
            if body.0.len() + wire::directory_entry_bytes(name, plus) > size {
                return Ok(body);
            }
            at += 1;
            if plus {
                body = match inode {
                    Some(inode) => {
                        let attributes = self.newest_attributes(inode);
                        wire::entry(body, inode.id.0, &attributes, self.valid)
                    }
                    // Removed meanwhile, or the query failed: the kernel looks it up itself.
                    None => body.zeros(128),
                };
            }
            body = wire::directory_entry(body, entry.inode.0, at, kind_bits(entry.kind), name);
        }
    }

    /// The entry with this number, if there is one.
    async fn entry_at<'a>(
        &self,
        call: &Call<'_>,
        listing: &'a mut Listing,
        directory: InodeId,
        number: u64,
    ) -> Result<Option<&'a (Entry, Option<Inode>)>, Errno> {
        if number == 0 || number < listing.first {
            // List from the start, with the current entries.
            *listing = Listing::default();
        }
        while number >= listing.first + listing.entries.len() as u64 {
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
        Ok(listing.entries.get((number - listing.first) as usize))
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
        let inodes = entries.iter().map(|entry| At::inode(entry.inode)).collect();
        let query = MetaQuery::StatMany { at: inodes };
        let inodes = match self.query_as_root(call, &what, query).await? {
            MetaReply::Inodes(inodes) if inodes.len() == entries.len() => inodes,
            other => return Err(unexpected(&other)),
        };
        let entries = entries.into_iter().zip(inodes).map(|(entry, inode)| (entry, inode.ok()));
        Ok((entries.collect(), more))
    }
}
