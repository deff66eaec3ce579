//! What clients were told, and whether it fits together.
//!
//! Every answer names a version of its chunk. That makes linearizability checkable without a
//! search: versions are the order, and real time must agree with it. What replicas commit while
//! they serve (with a lease, so nobody may have gone on without them) is the truth about versions.

use std::collections::BTreeMap;

use bytes::Bytes;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChunkId, ChunkVersion, RequestTag};

use crate::store::{Slot, Store, Version};

/// An update as a client meant it.
#[derive(Clone, Debug)]
pub struct Intent {
    /// Which chunk.
    pub chunk: ChunkId,
    /// What to do.
    pub change: ContentChange,
    /// With which bytes.
    pub payload: Bytes,
}

#[derive(Clone, Debug)]
struct Done {
    invoked: u64,
    completed: u64,
    version: ChunkVersion,
    /// Made its version: must be later than all that was done before.
    made: bool,
}

#[derive(Clone, Debug)]
struct CommittedVersion {
    tag: RequestTag,
    content: Bytes,
    /// Made of no content before.
    fresh: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct History {
    intents: BTreeMap<RequestTag, Intent>,
    done: BTreeMap<ChunkId, Vec<Done>>,
    committed_versions: BTreeMap<(ChunkId, ChunkVersion), CommittedVersion>,
    versions: BTreeMap<RequestTag, ChunkVersion>,
    /// When a target without all updates of a chunk was made to lead.
    promoted_at: BTreeMap<ChunkId, u64>,
    /// The newest version of a chunk of which a replica has dropped all that it knew. A chunk that
    /// is unknown is removed by that version.
    purged: BTreeMap<ChunkId, ChunkVersion>,
    /// Reads and updates that were answered.
    pub answers: u64,
}

impl History {
    /// A client begins an update.
    pub fn invoke(&mut self, tag: RequestTag, intent: Intent) {
        self.intents.insert(tag, intent);
    }

    /// A serving replica has committed a version.
    ///
    /// # Errors
    /// Another replica has committed something else as this version, or the update has made
    /// another version before, or the content does not follow from the version before.
    pub fn committed(
        &mut self,
        chunk: ChunkId,
        version: ChunkVersion,
        tag: RequestTag,
        made: &Version,
    ) -> Result<(), String> {
        let content = &made.bytes;
        if let Some(before) = self.committed_versions.get(&(chunk, version)) {
            if before.tag != tag || before.content != content {
                return Err(format!(
                    "{chunk} version {version} was made by {} as {:?} and by {tag} as {content:?}",
                    before.tag, before.content
                ));
            }
            return Ok(());
        }
        if let Some(before) = self.versions.insert(tag, version)
            && before != version
        {
            return Err(format!("{tag} made versions {before} and {version} of {chunk}"));
        }
        let committed_versions =
            CommittedVersion { tag, content: content.clone(), fresh: made.fresh };
        self.committed_versions.insert((chunk, version), committed_versions);
        self.check_content(chunk, version)?;
        self.check_content(chunk, version.next())
    }

    /// A replica knows nothing any more of a chunk that was removed by this version.
    pub fn purged(&mut self, chunk: ChunkId, version: ChunkVersion) {
        let known = self.purged.entry(chunk).or_default();
        *known = version.max(*known);
    }

    /// What the version that a replica names stands for.
    #[must_use]
    pub fn named(&self, chunk: ChunkId, version: ChunkVersion) -> ChunkVersion {
        match version {
            ChunkVersion(0) => self.purged.get(&chunk).copied().unwrap_or_default(),
            version => version,
        }
    }

    fn check_content(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), String> {
        let Some(after) = self.committed_versions.get(&(chunk, version)) else { return Ok(()) };
        let before = match version.0 {
            0 | 1 => Bytes::new(),
            _ => match self.committed_versions.get(&(chunk, ChunkVersion(version.0 - 1))) {
                Some(before) => before.content.clone(),
                // Versions go on above those of all chunks that were purged.
                None if after.fresh => Bytes::new(),
                None => return Ok(()),
            },
        };
        let Some(intent) = self.intents.get(&after.tag) else {
            return Err(format!("{chunk} version {version} was made by nobody: {}", after.tag));
        };
        let expected = Store::changed(&before, intent.change, &intent.payload);
        if intent.chunk != chunk || expected != after.content {
            return Err(format!(
                "{chunk} version {version} is {:?}, {:?} of {before:?} would be {expected:?}",
                after.content, intent
            ));
        }
        Ok(())
    }

    /// A client was told that its update made `version`.
    ///
    /// # Errors
    /// Somebody else made that version, or the update another one.
    pub fn acknowledged(
        &mut self,
        tag: RequestTag,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
    ) -> Result<(), String> {
        let Some(intent) = self.intents.get(&tag) else {
            return Err(format!("{tag} was never asked for"));
        };
        let chunk = intent.chunk;
        if self.is_before_promotion(chunk, invoked) {
            return Ok(());
        }
        let version = self.named(chunk, version);
        let removed_nothing =
            intent.change == ContentChange::Remove && self.versions.get(&tag) != Some(&version);
        if !removed_nothing {
            if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
                && committed_versions.tag != tag
            {
                return Err(format!(
                    "{tag} was told that it made {chunk} version {version}, which {} made",
                    committed_versions.tag
                ));
            }
            if let Some(other) = self.versions.insert(tag, version)
                && other != version
            {
                return Err(format!("{tag} was told {version}, but made {other} of {chunk}"));
            }
        }
        self.answers += 1;
        let made = !removed_nothing;
        self.done.entry(chunk).or_default().push(Done { invoked, completed, version, made });
        Ok(())
    }

    /// A client has read `content` as `version`.
    ///
    /// # Errors
    /// The version has another content.
    pub fn read(
        &mut self,
        chunk: ChunkId,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
        content: &Bytes,
    ) -> Result<(), String> {
        if self.is_before_promotion(chunk, invoked) {
            return Ok(());
        }
        let version = self.named(chunk, version);
        if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
            && committed_versions.content != content
        {
            return Err(format!(
                "{chunk} version {version} was read as {content:?}, it is {:?}",
                committed_versions.content
            ));
        }
        self.answers += 1;
        self.done.entry(chunk).or_default().push(Done { invoked, completed, version, made: false });
        Ok(())
    }

    /// Another target was made to lead the chain of these chunks, which nothing served: what its
    /// store does not have is lost. Answers to requests from before then say nothing any more.
    ///
    /// # Errors
    /// As [`Self::check_order`], about what was answered until now.
    pub fn promoted(
        &mut self,
        now: u64,
        chunks: impl Iterator<Item = ChunkId>,
        slots: &BTreeMap<ChunkId, Slot>,
    ) -> Result<(), String> {
        self.check_order()?;
        for chunk in chunks {
            let kept = slots.get(&chunk).map(|slot| slot.committed.clone()).unwrap_or_default();
            let newest = kept.state.version;
            self.committed_versions.retain(|(of, version), _| *of != chunk || *version < newest);
            self.versions.retain(|tag, version| {
                self.intents.get(tag).is_none_or(|it| it.chunk != chunk) || *version <= newest
            });
            if let Some(applied) = kept.state.tags.newest() {
                let committed_versions =
                    CommittedVersion { tag: applied.tag, content: kept.bytes, fresh: kept.fresh };
                self.committed_versions.insert((chunk, newest), committed_versions);
                self.versions.insert(applied.tag, newest);
            }
            self.done.remove(&chunk);
            self.purged.remove(&chunk);
            self.promoted_at.insert(chunk, now);
        }
        Ok(())
    }

    fn is_before_promotion(&self, chunk: ChunkId, invoked: u64) -> bool {
        self.promoted_at.get(&chunk).is_some_and(|at| invoked <= *at)
    }

    /// Does real time agree with the order of versions, on every chunk?
    ///
    /// # Errors
    /// Something that began after another had ended comes before it.
    pub fn check_order(&self) -> Result<(), String> {
        for (chunk, done) in &self.done {
            let mut by_begin: Vec<&Done> = done.iter().collect();
            by_begin.sort_by_key(|one| one.invoked);
            let mut by_end: Vec<&Done> = done.iter().collect();
            by_end.sort_by_key(|one| one.completed);
            let mut ended = by_end.into_iter().peekable();
            let mut newest = ChunkVersion(0);
            for one in by_begin {
                while let Some(before) = ended.next_if(|before| before.completed < one.invoked) {
                    newest = newest.max(before.version);
                }
                let too_old =
                    one.version < newest || (one.made && one.version == newest && newest.0 > 0);
                if too_old {
                    return Err(format!(
                        "{chunk}: {} of version {} began at {} us, after version {newest} was \
                         known to a client",
                        if one.made { "an update" } else { "a read" },
                        one.version,
                        one.invoked
                    ));
                }
            }
        }
        Ok(())
    }

    /// The newest version of a chunk that any client knows of.
    #[must_use]
    pub fn newest_known(&self, chunk: ChunkId) -> ChunkVersion {
        let known = self.done.get(&chunk).into_iter().flatten().map(|one| one.version);
        known.max().unwrap_or_default()
    }

    /// Chunks that clients have touched.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkId> {
        self.done.keys().copied()
    }
}
