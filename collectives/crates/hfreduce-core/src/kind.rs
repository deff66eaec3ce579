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
}
