//! Mutations: each removes one rule of the design. The schedules must find each of them, and
//! nothing without them.

/// A seeded bug.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// No bug.
    #[default]
    None,
    /// A node does not refuse updates of an earlier epoch.
    AcceptOldEpochs,
    /// A node confirms a fence while it executes updates from before it.
    FenceWithoutDrain,
    /// A creation does not wait for a node that serves but cannot be reached.
    SkipUnreachable,
    /// A restarted node serves before it has the fences.
    ServeWithoutFences,
    /// A chain serves without its former head before it has resolved pending updates.
    ResolveLater,
    /// A creation commits before the nodes are fenced.
    CommitFirst,
    /// A successor of a creator that died commits without fencing the nodes again.
    TrustCreator,
    /// An update is executed although its chunk has a version of a newer epoch.
    IgnoreNewerVersion,
    /// An aborted creation does not end the epoch.
    KeepEpoch,
    /// An update that is sent again after a fence has a new tag.
    NewTagAfterFence,
    /// A new version of a chunk does not keep the tags of the one before.
    ForgetTags,
    /// A write of a newer epoch changes the version that snapshots show.
    WriteInPlace,
    /// A new version of a chunk does not start as a copy of the one before.
    WriteWithoutCopy,
    /// A truncation cuts the version that snapshots show.
    CutInPlace,
    /// A length in a snapshot does not count chunks that no client had reported.
    TrustReportedLength,
    /// A length in a snapshot counts chunks that a truncation had not cut yet.
    CountUncut,
    /// A changed inode is not kept for snapshots.
    ForgetInodes,
    /// A changed name is not kept for snapshots.
    ForgetNames,
    /// New names are shown in older snapshots.
    IgnoreAge,
    /// Rows of a removed snapshot that a clone still copies are dropped.
    IgnoreClones,
    /// A name that was removed from a clone before it was copied comes back.
    CopyRemoved,
    /// Two names of one file become two files in a clone.
    SplitLinks,
    /// A clone shows bytes beyond the length in its snapshot.
    ShowBeyondLength,
    /// A version of a chunk is dropped although a snapshot shows it.
    DropShown,
    /// A node drops a version by a list of snapshots from before the version that replaced it.
    TrustOldList,
    /// Chunks of a removed file are dropped although a snapshot shows it.
    DropRemoved,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Self; 26] = [
        Self::AcceptOldEpochs,
        Self::FenceWithoutDrain,
        Self::SkipUnreachable,
        Self::ServeWithoutFences,
        Self::ResolveLater,
        Self::CommitFirst,
        Self::TrustCreator,
        Self::IgnoreNewerVersion,
        Self::KeepEpoch,
        Self::NewTagAfterFence,
        Self::ForgetTags,
        Self::WriteInPlace,
        Self::WriteWithoutCopy,
        Self::CutInPlace,
        Self::TrustReportedLength,
        Self::CountUncut,
        Self::ForgetInodes,
        Self::ForgetNames,
        Self::IgnoreAge,
        Self::IgnoreClones,
        Self::CopyRemoved,
        Self::SplitLinks,
        Self::ShowBeyondLength,
        Self::DropShown,
        Self::TrustOldList,
        Self::DropRemoved,
    ];
}
