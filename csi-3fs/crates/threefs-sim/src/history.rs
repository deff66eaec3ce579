//! Linearizability check of the replies to clients.
//!
//! Every reply names a version of its chunk, so linearizability can be checked without a search:
//! the versions are the order, and real time must agree with it. The versions are those that
//! serving replicas commit (with a lease, so the chain cannot have continued without them).

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChunkId, ChunkVersion, Epoch, RequestTag};

use crate::store::{Slot, Store, Version};

/// An update as intended by a client.
#[derive(Clone, Debug)]
pub struct Intent {
    /// The chunk.
    pub chunk: ChunkId,
    /// The change.
    pub change: ContentChange,
    /// Its payload.
    pub payload: Bytes,
}

#[derive(Clone, Debug)]
struct CompletedRequest {
    invoked: u64,
    completed: u64,
    version: ChunkVersion,
    /// The request is an update: its version must be later than all earlier results.
    is_write: bool,
}

#[derive(Clone, Debug)]
struct CommittedVersion {
    tag: RequestTag,
    content: Bytes,
    /// Made from no earlier content.
    fresh: bool,
}

/// History of a schedule.
#[derive(Debug, Default)]
pub struct History {
    intents: BTreeMap<RequestTag, Intent>,
    completed_requests: BTreeMap<ChunkId, Vec<CompletedRequest>>,
    committed_versions: BTreeMap<(ChunkId, ChunkVersion), CommittedVersion>,
    versions: BTreeMap<RequestTag, ChunkVersion>,
    /// Last promotion of a target without all updates of a chunk.
    promoted_at: BTreeMap<ChunkId, u64>,
    /// Versions of chunks that a promoted target had besides a newer one that does not continue them: it
    /// was promoted in the middle of a sync.
    disordered: BTreeSet<ChunkId>,
    /// The epoch in which each version was made.
    epochs: BTreeMap<(ChunkId, ChunkVersion), Epoch>,
    /// Reads of epochs that have ended, by chunk and epoch.
    reads_up_to: BTreeMap<ChunkId, Vec<CompletedRequest>>,
    /// The newest purged version of a chunk in an epoch. A replica without the chunk has removed it
    /// by that version.
    purged: BTreeMap<ChunkId, ChunkVersion>,
    /// Number of answered reads and updates.
    pub answers: u64,
}

impl History {
    /// Records an update that a client starts.
    pub fn invoke(&mut self, tag: RequestTag, intent: Intent) {
        self.intents.insert(tag, intent);
    }

    /// Records a version committed by a serving replica.
    ///
    /// # Errors
    /// Another replica has committed other content as this version, or the update has made another
    /// version before, or the content does not follow from the previous version.
    pub fn committed(
        &mut self,
        chunk: ChunkId,
        version: ChunkVersion,
        tag: RequestTag,
        content_version: &Version,
    ) -> Result<(), String> {
        if self.disordered.contains(&chunk) {
            return Ok(());
        }
        let content = &content_version.bytes;
        let (id, chunk) = (chunk, chunk.first_version());
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
            CommittedVersion { tag, content: content.clone(), fresh: content_version.fresh };
        self.committed_versions.insert((chunk, version), committed_versions);
        self.check_epoch(id, version)?;
        self.check_content(chunk, version)?;
        self.check_content(chunk, version.next())
    }

    /// Records that a replica has dropped a chunk that was removed by this version.
    pub fn purged(&mut self, chunk: ChunkId, version: ChunkVersion) {
        let floor = self.purged.entry(chunk).or_default();
        *floor = version.max(*floor);
    }

    /// The actual version of a chunk, up to the epoch in its id, with this reported version: 0 means
    /// the purged version.
    #[must_use]
    pub fn resolve_version(&self, chunk: ChunkId, version: ChunkVersion) -> ChunkVersion {
        let purged = || self.purged.range(chunk.first_version()..=chunk).map(|(_, it)| *it).max();
        match version {
            ChunkVersion(0) => purged().unwrap_or_default(),
            version => version,
        }
    }

    /// Checks that no later epoch has changed the chunk before this version. A purged chunk starts
    /// anew: it has no other versions.
    fn check_epoch(&mut self, chunk: ChunkId, version: ChunkVersion) -> Result<(), String> {
        let first = chunk.first_version();
        self.epochs.insert((first, version), chunk.epoch);
        let purged = self.resolve_version(chunk.last_version(), ChunkVersion(0));
        let mut earlier = self.epochs.range((first, ChunkVersion(0))..(first, version));
        match earlier.find(|((_, it), epoch)| *it > purged && **epoch > chunk.epoch) {
            Some(((_, before), epoch)) => Err(format!(
                "{chunk} was changed by version {version}, after version {before} of epoch {epoch}"
            )),
            None => Ok(()),
        }
    }

    fn check_content(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), String> {
        let Some(after) = self.committed_versions.get(&(chunk, version)) else { return Ok(()) };
        let before = match version.0 {
            0 | 1 => Bytes::new(),
            _ => match self.committed_versions.get(&(chunk, ChunkVersion(version.0 - 1))) {
                Some(before) => before.content.clone(),
                // Versions continue above those of all purged chunks.
                None if after.fresh => Bytes::new(),
                None => return Ok(()),
            },
        };
        let Some(intent) = self.intents.get(&after.tag) else {
            return Err(format!(
                "{chunk} version {version} was made by an unknown update: {}",
                after.tag
            ));
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

    /// Records the reply to an update, which made `version`.
    ///
    /// # Errors
    /// Another update made that version, or the update made another one.
    pub fn acknowledged(
        &mut self,
        tag: RequestTag,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
    ) -> Result<(), String> {
        let Some(intent) = self.intents.get(&tag) else {
            return Err(format!("reply to an unknown update {tag}"));
        };
        let chunk = intent.chunk;
        if self.is_before_promotion(chunk, invoked) {
            return Ok(());
        }
        let version = self.resolve_version(chunk.last_version(), version);
        let removed_nothing =
            intent.change == ContentChange::Remove && self.versions.get(&tag) != Some(&version);
        if !removed_nothing {
            if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
                && committed_versions.tag != tag
            {
                return Err(format!(
                    "the reply to {tag} names {chunk} version {version}, which {} made",
                    committed_versions.tag
                ));
            }
            if let Some(other) = self.versions.insert(tag, version)
                && other != version
            {
                return Err(format!(
                    "the reply to {tag} names version {version}, but it made {other} of {chunk}"
                ));
            }
        }
        self.answers += 1;
        let is_write = !removed_nothing;
        self.completed_requests.entry(chunk).or_default().push(CompletedRequest {
            invoked,
            completed,
            version,
            is_write,
        });
        Ok(())
    }

    /// Records the reply to a read, with `content` as `version`: the newest version up to the epoch of
    /// `chunk`.
    ///
    /// # Errors
    /// The version has other content, or is of a later epoch.
    pub fn read(
        &mut self,
        chunk: ChunkId,
        invoked: u64,
        completed: u64,
        version: ChunkVersion,
        content: &Bytes,
    ) -> Result<(), String> {
        let (view, chunk) = (chunk, chunk.first_version());
        let is_disordered = self.disordered.range(chunk..=view).next().is_some();
        if self.is_before_promotion(chunk, invoked)
            || (is_disordered && view != chunk.last_version())
        {
            return Ok(());
        }
        let version = self.resolve_version(view, version);
        if let Some(epoch) = self.epochs.get(&(chunk, version)).filter(|it| **it > view.epoch) {
            return Err(format!("a read of {view} got version {version} of epoch {epoch}"));
        }
        if let Some(committed_versions) = self.committed_versions.get(&(chunk, version))
            && committed_versions.content != content
        {
            return Err(format!(
                "{chunk} version {version} was read as {content:?}, it is {:?}",
                committed_versions.content
            ));
        }
        self.answers += 1;
        let request = CompletedRequest { invoked, completed, version, is_write: false };
        if view == chunk.last_version() {
            self.completed_requests.entry(chunk).or_default().push(request);
        } else {
            self.reads_up_to.entry(view).or_default().push(request);
        }
        Ok(())
    }

    /// Records the promotion of another target of a chain without a serving one: data that its
    /// store lacks is lost. Replies to earlier requests are no longer checked.
    ///
    /// # Errors
    /// As [`Self::check_order`], for the replies until now.
    pub fn promoted(
        &mut self,
        now: u64,
        chunks: impl Iterator<Item = ChunkId>,
        slots: &BTreeMap<ChunkId, Slot>,
    ) -> Result<(), String> {
        self.check_order()?;
        for chunk in chunks {
            let mut copies: BTreeMap<Epoch, &Version> = BTreeMap::new();
            let mut end = ChunkVersion(u64::MAX);
            self.disordered.retain(|id| !id.is_version_of(chunk));
            for (id, slot) in slots.range(chunk..=chunk.last_version()).rev() {
                let version = slot.committed.state.version;
                let is_newest = end == ChunkVersion(u64::MAX);
                if is_newest || (slot.pending.is_none() && version < end) {
                    copies.insert(id.epoch, &slot.committed);
                    let pending = slot.pending.as_ref().map_or(version, |it| it.state.version);
                    end = if version > ChunkVersion(0) { version } else { pending };
                } else {
                    self.disordered.insert(*id);
                }
            }
            let newest = copies.values().map(|it| it.state.version).max().unwrap_or_default();
            self.committed_versions.retain(|(of, version), _| *of != chunk || *version < newest);
            self.versions.retain(|tag, version| {
                self.intents.get(tag).is_none_or(|it| it.chunk != chunk) || *version <= newest
            });
            self.epochs.retain(|(of, _), _| *of != chunk);
            for (epoch, copy) in copies {
                let version = copy.state.version;
                if let Some(newest_tag) = copy.state.tags.newest() {
                    let committed_versions = CommittedVersion {
                        tag: newest_tag.tag,
                        content: copy.bytes.clone(),
                        fresh: copy.fresh,
                    };
                    self.committed_versions.insert((chunk, version), committed_versions);
                    self.versions.insert(newest_tag.tag, version);
                    self.epochs.insert((chunk, version), epoch);
                }
            }
            self.completed_requests.remove(&chunk);
            self.reads_up_to.retain(|view, _| !view.is_version_of(chunk));
            self.purged.retain(|view, _| !view.is_version_of(chunk));
            self.promoted_at.insert(chunk, now);
        }
        Ok(())
    }

    fn is_before_promotion(&self, chunk: ChunkId, invoked: u64) -> bool {
        self.promoted_at.get(&chunk).is_some_and(|at| invoked <= *at)
    }

    /// Checks that real time agrees with the order of versions, on every chunk.
    ///
    /// # Errors
    /// A request that started after another had ended precedes it.
    pub fn check_order(&self) -> Result<(), String> {
        let newest = self.completed_requests.iter();
        let newest = newest.map(|(chunk, requests)| (*chunk, requests.iter().collect()));
        for (chunk, requests) in newest.chain(self.views()) {
            let mut by_start: Vec<&CompletedRequest> = requests;
            let mut by_end = by_start.clone();
            by_start.sort_by_key(|request| request.invoked);
            by_end.sort_by_key(|request| request.completed);
            let mut completions = by_end.into_iter().peekable();
            let mut newest = ChunkVersion(0);
            for request in by_start {
                while let Some(before) =
                    completions.next_if(|before| before.completed < request.invoked)
                {
                    newest = newest.max(before.version);
                }
                let too_old = request.version < newest
                    || (request.is_write && request.version == newest && newest.0 > 0);
                if too_old {
                    return Err(format!(
                        "{chunk}: {} of version {} started at {} us, after version {newest} was \
                         known to a client",
                        if request.is_write { "an update" } else { "a read" },
                        request.version,
                        request.invoked
                    ));
                }
            }
        }
        Ok(())
    }

    /// For each read chunk and epoch, the reads and the updates up to that epoch.
    fn views(&self) -> impl Iterator<Item = (ChunkId, Vec<&CompletedRequest>)> {
        self.reads_up_to.iter().map(move |(view, reads)| {
            let chunk = view.first_version();
            let all = self.completed_requests.get(&chunk).into_iter().flatten();
            let is_shown = |it: &&CompletedRequest| {
                let epoch = self.epochs.get(&(chunk, it.version));
                it.is_write && epoch.is_some_and(|epoch| *epoch <= view.epoch)
            };
            (*view, all.filter(is_shown).chain(reads).collect())
        })
    }

    /// Checks the content of the version that a store has of a chunk in an epoch.
    ///
    /// # Errors
    /// The epoch has made a later version, or the version has other content.
    pub fn check_stored(&self, chunk: ChunkId, stored: &Version) -> Result<(), String> {
        if self.disordered.contains(&chunk) {
            return Ok(());
        }
        let (first, version) = (chunk.first_version(), stored.state.version);
        let of_chunk = self.epochs.range((first, version.next())..=(first, ChunkVersion(u64::MAX)));
        if let Some(((_, later), _)) = of_chunk.into_iter().find(|(_, it)| **it == chunk.epoch) {
            return Err(format!("{chunk} is stored in version {version}, version {later} exists"));
        }
        match self.committed_versions.get(&(first, version)) {
            Some(committed) if committed.content != stored.bytes => Err(format!(
                "{chunk} version {version} is stored as {:?}, it is {:?}",
                stored.bytes, committed.content
            )),
            _ => Ok(()),
        }
    }

    /// Checks the version that a store shows of a chunk in a snapshot: of the epoch of `view`.
    ///
    /// # Errors
    /// The snapshot shows a newer version.
    pub fn check_shown(&self, view: ChunkId, stored: ChunkVersion) -> Result<(), String> {
        let first = view.first_version();
        let stored = self.resolve_version(view, stored);
        let of_chunk = self.epochs.range((first, stored.next())..=(first, ChunkVersion(u64::MAX)));
        match of_chunk.into_iter().find(|(_, epoch)| **epoch <= view.epoch) {
            Some(((_, version), epoch)) => Err(format!(
                "{view} is stored in version {stored}, version {version} of epoch {epoch} is shown"
            )),
            None => Ok(()),
        }
    }

    /// The newest version of a chunk that any client has observed.
    #[must_use]
    pub fn newest_known(&self, chunk: ChunkId) -> ChunkVersion {
        let versions = self
            .completed_requests
            .get(&chunk)
            .into_iter()
            .flatten()
            .map(|request| request.version);
        versions.max().unwrap_or_default()
    }

    /// Chunks used by clients.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkId> {
        self.completed_requests.keys().copied()
    }
}
