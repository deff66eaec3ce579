//! Kinds of operation.

hfreduce_kernels::coded_enum! {
    /// Kinds of operation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        /// Reduces the inputs of all ranks; every rank receives the result.
        Allreduce = (0, "allreduce"),
        /// Copies the root's buffer to every rank.
        Broadcast = (1, "broadcast"),
        /// Reduces the inputs of all ranks; the root receives the result.
        Reduce = (2, "reduce"),
        /// Every rank receives the blocks of all ranks.
        Allgather = (3, "allgather"),
        /// Reduces the inputs of all ranks; rank r receives block r.
        ReduceScatter = (4, "reduce_scatter"),
        /// No rank leaves before all ranks have entered.
        Barrier = (5, "barrier"),
        /// The root receives the blocks of all ranks.
        Gather = (6, "gather"),
        /// Rank r receives block r of the root's buffer.
        Scatter = (7, "scatter"),
        /// Rank s receives block s of every rank.
        Alltoall = (8, "alltoall"),
        /// Sends a message to another rank.
        Send = (9, "send"),
        /// Receives a message from another rank.
        Recv = (10, "recv"),
    }
}

impl Kind {
    /// True for operations that reduce values.
    #[inline]
    pub fn reduces(self) -> bool {
        matches!(self, Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// True for operations that use the trees; the others use point-to-point connections.
    #[inline]
    pub fn uses_trees(self) -> bool {
        (self as u8) <= Kind::Barrier as u8
    }

    /// True for messages between two ranks; the others are collective.
    #[inline]
    pub fn is_message(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv)
    }

    /// True for operations in which one rank, the root, has another part than the others.
    #[inline]
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    /// True for operations whose input and output are one buffer.
    #[inline]
    pub fn is_in_place(self) -> bool {
        matches!(self, Kind::Allreduce | Kind::Broadcast | Kind::Reduce) || self.is_message()
    }

    /// Blocks, of as many elements as the call counts, in the input and in the output of a rank;
    /// those of an alltoall may differ in size.
    #[inline]
    pub fn blocks(self, is_root: bool, ranks: usize) -> (usize, usize) {
        let ranks_at_root = if is_root { ranks } else { 0 };
        match self {
            Kind::Allreduce | Kind::Broadcast | Kind::Reduce | Kind::Send | Kind::Recv => (1, 1),
            Kind::Allgather => (1, ranks),
            Kind::ReduceScatter => (ranks, 1),
            Kind::Gather => (1, ranks_at_root),
            Kind::Scatter => (ranks_at_root, 1),
            Kind::Alltoall => (ranks, ranks),
            Kind::Barrier => (0, 0),
        }
    }

    /// True if the input of a rank is read.
    #[inline]
    pub fn reads_input(self, is_root: bool) -> bool {
        match self {
            Kind::Broadcast => is_root,
            Kind::Recv => false,
            _ => true,
        }
    }

    /// True if the output of a rank is written.
    #[inline]
    pub fn writes_output(self, is_root: bool) -> bool {
        match self {
            Kind::Broadcast => !is_root,
            Kind::Reduce => is_root,
            Kind::Send => false,
            _ => true,
        }
    }
}
