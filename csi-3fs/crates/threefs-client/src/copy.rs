//! Copies of trees by inode: data, holes and attributes of files, for a volume with the contents of
//! a snapshot.
//!
//! A copy is resumed by repeating it. The data of a file is copied in ascending order and each part
//! is durable before the next one starts, so a copy continues at the length that the destination
//! has. Times are set in the last change, so a file whose time of modification is equal is complete.

use bytes::Bytes;
use threefs_core::ids::InodeId;
use threefs_meta::protocol::{BATCH_MAX, RESERVED_ATTRIBUTES};
use threefs_meta::{
    At, Entry, Inode, InodeKind, LayoutDefaults, MetaChange, MetaError, MetaQuery, MetaReply,
    SetMode, SetTime,
};

use crate::Client;
use crate::error::ClientError;
use crate::files::{FileHandle, inode};
use crate::read::ReadPlan;
use crate::write::FileWrite;

/// Bytes that one copy of a file has in memory.
const PART_BYTES: u64 = 8 << 20;
/// Parts of a file that one call copies, so that callers can stop, or copy other files between.
const PARTS_PER_CALL: u32 = 8;
/// Permission bits until the attributes are copied.
const UNFINISHED_FILE_MODE: u32 = 0o600;
const UNFINISHED_DIRECTORY_MODE: u32 = 0o700;

impl Client {
    /// One page of a directory in byte order of the names, with inodes; `after` is the last name of
    /// the page before. Also returns whether there are more.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn scan_page(
        &self,
        directory: InodeId,
        after: &str,
        limit: u32,
    ) -> Result<(Vec<(Entry, Inode)>, bool), ClientError> {
        let query = MetaQuery::List { at: At::inode(directory), after: after.into(), limit };
        let (entries, more) = match self.query("list", &directory.to_string(), query).await? {
            MetaReply::Page { entries, more } => (entries, more),
            other => return Err(ClientError::unexpected("meta", &other)),
        };
        let at = entries.iter().map(|entry| At::inode(entry.inode)).collect();
        let inodes = self.stat_many("list", &directory.to_string(), at).await?;
        let mut page = Vec::with_capacity(entries.len());
        for (entry, inode) in entries.into_iter().zip(inodes) {
            page.push((entry, inode?));
        }
        Ok((page, more))
    }

    /// Makes a directory, or opens it if it exists.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn open_directory(&self, parent: InodeId, name: &str) -> Result<Inode, ClientError> {
        let change = MetaChange::MakeDirectory {
            at: At::entry(parent, name),
            mode: UNFINISHED_DIRECTORY_MODE,
            parents: false,
            defaults: LayoutDefaults::default(),
        };
        let made = self.make_or_open("make directory", parent, name, change).await?;
        match made.is_directory() {
            true => Ok(made),
            false => Err(MetaError::NotADirectory { path: name.into() }.into()),
        }
    }

    /// Gives a file another name, which may be there already.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn link_inode(
        &self,
        file: InodeId,
        directory: InodeId,
        name: &str,
    ) -> Result<(), ClientError> {
        let change = MetaChange::Link { from: At::inode(file), to: At::entry(directory, name) };
        match self.make_or_open("link", directory, name, change).await? {
            linked if linked.id == file => Ok(()),
            _ => Err(MetaError::Exists { path: name.into() }.into()),
        }
    }

    /// Copies a file, symbolic link or special file with all its attributes, or completes its copy.
    /// Returns the inode, and for a longer file the offset from which the next call continues.
    ///
    /// # Errors
    /// Any [`ClientError`]. The copy may then be repeated.
    pub async fn copy_entry(
        &self,
        source: InodeId,
        directory: InodeId,
        name: &str,
        offset: u64,
    ) -> Result<(InodeId, Option<u64>), ClientError> {
        let query = MetaQuery::Stat { at: At::inode(source), follow: false };
        let from = inode(self.query("copy", name, query).await?)?;
        let at = At::entry(directory, name);
        let copied = match &from.kind {
            InodeKind::File { .. } => match self.copy_content(&from, at, name, offset).await? {
                (id, None) => id,
                unfinished => return Ok(unfinished),
            },
            InodeKind::Symlink { target } => {
                let change = MetaChange::MakeSymlink { at, target: target.clone() };
                self.make_or_open("copy", directory, name, change).await?.id
            }
            InodeKind::Special { kind, device } => {
                let (kind, device, mode) = (*kind, *device, UNFINISHED_FILE_MODE);
                let change = MetaChange::MakeSpecial { at, mode, kind, device };
                self.make_or_open("copy", directory, name, change).await?.id
            }
            InodeKind::Directory { .. } => {
                return Err(MetaError::IsADirectory { path: name.into() }.into());
            }
        };
        self.copy_attributes_of(&from, copied).await?;
        Ok((copied, None))
    }

    /// Copies extended attributes, owner, mode and times from one inode to another.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn copy_attributes(&self, source: InodeId, to: InodeId) -> Result<(), ClientError> {
        let query = MetaQuery::Stat { at: At::inode(source), follow: false };
        let from = inode(self.query("copy attributes of", &source.to_string(), query).await?)?;
        self.copy_attributes_of(&from, to).await
    }

    async fn copy_attributes_of(&self, from: &Inode, to: InodeId) -> Result<(), ClientError> {
        let (what, source) = (from.id.to_string(), At::inode(from.id));
        let query = MetaQuery::ListAttributes { at: source.clone() };
        let names = match self.query("copy attributes of", &what, query).await? {
            MetaReply::Names(names) => names,
            other => return Err(ClientError::unexpected("meta", &other)),
        };
        for name in names.into_iter().filter(|name| !name.starts_with(RESERVED_ATTRIBUTES)) {
            let query = MetaQuery::GetAttribute { at: source.clone(), name: name.clone() };
            let value = match self.query("copy attributes of", &what, query).await? {
                MetaReply::Attribute(value) => Some(value),
                other => return Err(ClientError::unexpected("meta", &other)),
            };
            let (at, mode) = (At::inode(to), SetMode::Any);
            let change = MetaChange::SetAttribute { at, name, value, mode };
            self.change("copy attributes of", &what, change).await?;
        }
        let change = MetaChange::SetAttributes {
            at: At::inode(to),
            follow: false,
            mode: Some(from.mode),
            uid: Some(from.uid),
            gid: Some(from.gid),
            accessed: Some(SetTime::At(from.accessed)),
            modified: Some(SetTime::At(from.modified)),
        };
        self.change("copy attributes of", &what, change).await.map(drop)
    }

    /// Makes a name, or returns the inode that has it.
    async fn make_or_open(
        &self,
        verb: &str,
        directory: InodeId,
        name: &str,
        change: MetaChange,
    ) -> Result<Inode, ClientError> {
        match self.change(verb, name, change).await {
            Ok(reply) => inode(reply),
            Err(ClientError::Meta(MetaError::Exists { .. })) => {
                let query = MetaQuery::Stat { at: At::entry(directory, name), follow: false };
                inode(self.query(verb, name, query).await?)
            }
            Err(error) => Err(error),
        }
    }

    /// Copies a file's data from an offset on, which is not before the length of the copy.
    async fn copy_content(
        &self,
        from: &Inode,
        at: At,
        name: &str,
        offset: u64,
    ) -> Result<(InodeId, Option<u64>), ClientError> {
        let change = MetaChange::Create {
            at,
            mode: UNFINISHED_FILE_MODE,
            exclusive: false,
            layout: LayoutDefaults::default(),
            write: false,
            track_open: false,
        };
        let to = match self.change("copy", name, change).await? {
            MetaReply::Opened { inode, .. } => inode,
            other => return Err(ClientError::unexpected("meta", &other)),
        };
        let (source, copy) = (FileHandle::of(name, from)?, FileHandle::of(name, &to)?);
        let (length, mut next, mut parts) = (from.length(), to.length().max(offset), 0);
        let mut end = to.length();
        while let Some(start) = self.data_at(&source, next, length).await? {
            if parts == PARTS_PER_CALL {
                return Ok((to.id, Some(start)));
            }
            parts += 1;
            next = length.min((start / PART_BYTES + 1) * PART_BYTES);
            let data = self.read_part(&source, start, next, length).await?;
            let writes = nonzero_parts(&copy, start, &data);
            if let Some(last) = writes.last() {
                end = last.offset + last.payload.len() as u64;
                self.write_files(writes).await?;
            }
        }
        if end < length {
            self.set_length(&copy, length).await?;
        }
        Ok((to.id, None))
    }

    /// The first offset from `from` on that is in a written chunk; `None` if there is none.
    async fn data_at(
        &self,
        file: &FileHandle,
        from: u64,
        length: u64,
    ) -> Result<Option<u64>, ClientError> {
        let size = u64::from(file.layout.chunk_bytes.max(1));
        let index = |offset: u64| u32::try_from(offset / size).unwrap_or(u32::MAX);
        if from >= length {
            return Ok(None);
        }
        let (mut first, last) = (index(from), index(length - 1));
        let mut written = file.written.clone();
        loop {
            // All pages of an inode with few ranges, otherwise those of these chunks.
            let mut window_last = last;
            if file.written.has_more() {
                window_last = last.min(first.saturating_add(BATCH_MAX as u32 - 1));
                let (at, chunks) = (At::inode(file.inode), (first..=window_last).collect());
                let query = MetaQuery::StatChunks { at, chunks };
                let current = inode(self.query("copy", &file.path, query).await?)?;
                written = FileHandle::of(&file.path, &current)?.written;
            }
            let start = written
                .iter()
                .filter(|(_, end)| *end >= first)
                .map(|(start, _)| start.max(first))
                .min()
                .filter(|start| *start <= window_last);
            match start {
                Some(start) => return Ok(Some(from.max(u64::from(start) * size))),
                None if window_last == last => return Ok(None),
                None => first = window_last + 1,
            }
        }
    }

    async fn read_part(
        &self,
        file: &FileHandle,
        start: u64,
        end: u64,
        length: u64,
    ) -> Result<Bytes, ClientError> {
        let mut plan = ReadPlan::default();
        let deadline = self.deadline();
        self.plan_range(&mut plan, file, length, start, Some(end - start), deadline).await?;
        let mut data = vec![0; usize::try_from(end - start).unwrap_or_default()];
        self.read_planned(plan, &mut [data.as_mut_slice()]).await?;
        Ok(Bytes::from(data))
    }
}

/// The bytes to write in each chunk of the destination, without zeros at their end: those are holes.
fn nonzero_parts(file: &FileHandle, start: u64, data: &Bytes) -> Vec<FileWrite> {
    let size = u64::from(file.layout.chunk_bytes.max(1));
    let (mut writes, mut at) = (Vec::new(), 0);
    while at < data.len() {
        let offset = start + at as u64;
        let rest = usize::try_from(size - offset % size).unwrap_or(usize::MAX);
        let end = data.len().min(at.saturating_add(rest));
        let part = data.slice(at..end);
        if let Some(last) = part.iter().rposition(|byte| *byte != 0) {
            let payload = part.slice(..=last);
            writes.push(FileWrite { file: file.clone(), offset, payload });
        }
        at = end;
    }
    writes
}
