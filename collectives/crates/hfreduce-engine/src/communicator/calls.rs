//! Calls of the operations: arguments are validated here and become submissions.

use std::time::Duration;

use super::{Communicator, TAG_MAX, Work};
use crate::operation::{Buffer, Transfer};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_core::matching::ANY_RANK;
use hfreduce_core::{DType, ReduceOp};
use hfreduce_core::{Determinism, Fingerprint, Kind};

impl Communicator {
    /// Reduces the buffers of all ranks in place; every rank receives the result.
    ///
    /// # Errors
    /// Invalid arguments, or a broken communicator.
    pub fn allreduce(
        &self,
        buffer: Buffer,
        dtype: DType,
        op: ReduceOp,
        shape: u64,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        self.check_op(Kind::Allreduce, dtype, op)?;
        let count = self.count(Kind::Allreduce, &buffer, dtype)?;
        let fingerprint =
            Fingerprint { shape, ..self.fingerprint(Kind::Allreduce, dtype, op as u8, 0, count) };
        self.submit(fingerprint, buffer.clone(), buffer, vec![], timeout, lazy)
    }

    /// Copies the root's buffer to all ranks, in place.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn broadcast(
        &self,
        buffer: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        self.check_rank(Kind::Broadcast, "root", root)?;
        let count = self.count(Kind::Broadcast, &buffer, dtype)?;
        let fingerprint = self.fingerprint(Kind::Broadcast, dtype, 0, root, count);
        self.submit(fingerprint, buffer.clone(), buffer, vec![], timeout, lazy)
    }

    /// Reduces the buffers of all ranks into the root's buffer.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn reduce(
        &self,
        buffer: Buffer,
        dtype: DType,
        op: ReduceOp,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        self.check_op(Kind::Reduce, dtype, op)?;
        self.check_rank(Kind::Reduce, "root", root)?;
        let count = self.count(Kind::Reduce, &buffer, dtype)?;
        let fingerprint = self.fingerprint(Kind::Reduce, dtype, op as u8, root, count);
        self.submit(fingerprint, buffer.clone(), buffer, vec![], timeout, lazy)
    }

    /// Gathers the inputs of all ranks, in rank order, in every rank's output.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn allgather(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let kind = Kind::Allgather;
        self.check_blocks(kind, "output", &output, &input)?;
        let count = self.count(kind, &input, dtype)?;
        self.submit(
            self.fingerprint(kind, dtype, 0, 0, count),
            input,
            output,
            vec![],
            timeout,
            lazy,
        )
    }

    /// Reduces the inputs of all ranks; rank r receives block r in its output.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn reduce_scatter(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        op: ReduceOp,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let kind = Kind::ReduceScatter;
        self.check_op(kind, dtype, op)?;
        self.check_blocks(kind, "input", &input, &output)?;
        let count = self.count(kind, &output, dtype)?;
        let fingerprint = self.fingerprint(kind, dtype, op as u8, 0, count);
        self.submit(fingerprint, input, output, vec![], timeout, lazy)
    }

    /// Gathers the inputs of all ranks, in rank order, in the root's output (ignored elsewhere).
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn gather(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let kind = Kind::Gather;
        self.check_rank(kind, "root", root)?;
        let bytes = input.bytes();
        let mut transfers = Vec::new();
        if self.rank() == root {
            self.check_blocks(kind, "output", &output, &input)?;
            input.copy_to(0, &output, root as usize * bytes, bytes);
            transfers.extend(self.others().map(|peer| (peer, false, peer as usize * bytes, bytes)));
        } else {
            transfers.push((root, true, 0, bytes));
        }
        let count = self.count(kind, &input, dtype)?;
        self.exchange(
            self.fingerprint(kind, dtype, 0, root, count),
            input,
            output,
            transfers,
            timeout,
            lazy,
        )
    }

    /// Copies block r of the root's input (ignored elsewhere) to rank r's output.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn scatter(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let kind = Kind::Scatter;
        self.check_rank(kind, "root", root)?;
        let bytes = output.bytes();
        let mut transfers = Vec::new();
        if self.rank() == root {
            self.check_blocks(kind, "input", &input, &output)?;
            input.copy_to(root as usize * bytes, &output, 0, bytes);
            transfers.extend(self.others().map(|peer| (peer, true, peer as usize * bytes, bytes)));
        } else {
            transfers.push((root, false, 0, bytes));
        }
        let count = self.count(kind, &output, dtype)?;
        self.exchange(
            self.fingerprint(kind, dtype, 0, root, count),
            input,
            output,
            transfers,
            timeout,
            lazy,
        )
    }

    /// Sends `input_counts[r]` elements to rank r and receives `output_counts[r]` from it.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    #[allow(clippy::too_many_arguments)] // The signature of the operation.
    pub fn alltoall(
        &self,
        input: Buffer,
        output: Buffer,
        input_counts: &[usize],
        output_counts: &[usize],
        dtype: DType,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let kind = Kind::Alltoall;
        let sends = self.split(kind, "input", &input, input_counts, dtype)?;
        let receives = self.split(kind, "output", &output, output_counts, dtype)?;
        let own = self.rank() as usize;
        if sends[own].1 != receives[own].1 {
            let detail = format!(
                "rank {own} sends {} elements to itself and receives {}",
                input_counts[own], output_counts[own]
            );
            return Err(self.refused(ErrorKind::Invalid, kind.name(), detail));
        }
        input.copy_to(sends[own].0, &output, receives[own].0, sends[own].1);
        let mut transfers = Vec::new();
        // Every rank starts with the next rank, so that not all send to rank 0 first.
        for peer in self.others() {
            let (offset, bytes) = receives[peer as usize];
            transfers.push((peer, false, offset, bytes));
            let (offset, bytes) = sends[peer as usize];
            transfers.push((peer, true, offset, bytes));
        }
        self.exchange(
            self.fingerprint(kind, dtype, 0, 0, 0),
            input,
            output,
            transfers,
            timeout,
            lazy,
        )
    }

    /// Sends to a rank, which receives with the same tag.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn send(
        &self,
        buffer: Buffer,
        dtype: DType,
        peer: u32,
        tag: u64,
        timeout: Duration,
    ) -> Result<Work, CollectiveError> {
        self.check_rank(Kind::Send, "peer", peer)?;
        self.point_to_point(Kind::Send, buffer, dtype, peer, tag, timeout)
    }

    /// Receives from a rank, which sends with the same tag.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn recv(
        &self,
        buffer: Buffer,
        dtype: DType,
        peer: u32,
        tag: u64,
        timeout: Duration,
    ) -> Result<Work, CollectiveError> {
        self.check_rank(Kind::Recv, "peer", peer)?;
        self.point_to_point(Kind::Recv, buffer, dtype, peer, tag, timeout)
    }

    /// Receives from the first rank that sends with the same tag; [`Work::source`] returns that
    /// rank.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn recv_any(
        &self,
        buffer: Buffer,
        dtype: DType,
        tag: u64,
        timeout: Duration,
    ) -> Result<Work, CollectiveError> {
        self.point_to_point(Kind::Recv, buffer, dtype, ANY_RANK, tag, timeout)
    }

    fn point_to_point(
        &self,
        kind: Kind,
        buffer: Buffer,
        dtype: DType,
        peer: u32,
        tag: u64,
        timeout: Duration,
    ) -> Result<Work, CollectiveError> {
        if peer == self.rank() || tag > TAG_MAX {
            let detail = format!(
                "peer {peer} (this is rank {}), tag {tag}: a rank cannot send to \
                 itself, and tags end at {TAG_MAX}",
                self.rank()
            );
            return Err(self.refused(ErrorKind::Invalid, kind.name(), detail));
        }
        let count = self.count(kind, &buffer, dtype)?;
        let bytes = buffer.bytes();
        let transfers = vec![Transfer { peer, sends: kind == Kind::Send, offset: 0, bytes, tag }];
        let fingerprint = self.fingerprint(kind, dtype, 0, 0, count);
        self.submit(fingerprint, buffer.clone(), buffer, transfers, timeout, false)
    }

    /// The other ranks, starting with the next one.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (own, world) = (self.rank(), self.world_size() as u32);
        (1..world).map(move |step| (own + step) % world)
    }

    /// Offset and size of each rank's part, in bytes; the counts must fill the buffer.
    fn split(
        &self,
        kind: Kind,
        what: &str,
        buffer: &Buffer,
        counts: &[usize],
        dtype: DType,
    ) -> Result<Vec<(usize, usize)>, CollectiveError> {
        let mut offset = 0_usize;
        let mut parts = Vec::with_capacity(counts.len());
        for count in counts {
            let bytes = count.saturating_mul(dtype.size_bytes());
            parts.push((offset, bytes));
            offset = offset.saturating_add(bytes);
        }
        if counts.len() != self.world_size() || offset != buffer.bytes() {
            let detail = format!(
                "{} {what} counts make {offset} bytes; the {what} has {} and there are {} ranks",
                counts.len(),
                buffer.bytes(),
                self.world_size()
            );
            return Err(self.refused(ErrorKind::Invalid, kind.name(), detail));
        }
        Ok(parts)
    }

    fn exchange(
        &self,
        fingerprint: Fingerprint,
        input: Buffer,
        output: Buffer,
        transfers: Vec<(u32, bool, usize, usize)>,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let transfers = transfers.into_iter();
        let transfers = transfers
            .map(|(peer, sends, offset, bytes)| Transfer { peer, sends, offset, bytes, tag: 0 })
            .collect();
        self.submit(fingerprint, input, output, transfers, timeout, lazy)
    }

    /// Returns after all ranks have entered.
    ///
    /// # Errors
    /// As for [`Communicator::allreduce`].
    pub fn barrier(&self, timeout: Duration, lazy: bool) -> Result<Work, CollectiveError> {
        let fingerprint = self.fingerprint(Kind::Barrier, DType::U8, 0, 0, 0);
        self.submit(fingerprint, Buffer::default(), Buffer::default(), vec![], timeout, lazy)
    }

    fn fingerprint(&self, kind: Kind, dtype: DType, op: u8, root: u32, count: u64) -> Fingerprint {
        Fingerprint {
            kind,
            dtype: dtype.code(),
            element_bytes: dtype.size_bytes() as u8,
            op,
            root,
            count,
            shape: 0,
            modes: match ReduceOp::from_code(op) {
                Some(op) if self.identity().placement.nodes().len() > 1 => {
                    self.identity().determinism.between_nodes(kind, dtype, op)
                }
                Some(op) => self.identity().determinism.of(kind, dtype, op),
                None => Determinism::DEFAULT,
            },
        }
    }

    fn count(&self, kind: Kind, buffer: &Buffer, dtype: DType) -> Result<u64, CollectiveError> {
        if !buffer.bytes().is_multiple_of(dtype.size_bytes()) {
            let detail =
                format!("{} bytes are not a multiple of the size of {dtype}", buffer.bytes());
            return Err(self.refused(ErrorKind::Invalid, kind.name(), detail));
        }
        Ok((buffer.bytes() / dtype.size_bytes()) as u64)
    }

    fn check_op(&self, kind: Kind, dtype: DType, op: ReduceOp) -> Result<(), CollectiveError> {
        if op.supports(dtype) {
            return Ok(());
        }
        let detail =
            format!("{} is not defined for {dtype}; use another type or operation", op.name());
        Err(self.refused(ErrorKind::Invalid, kind.name(), detail))
    }

    fn check_rank(&self, kind: Kind, what: &str, rank: u32) -> Result<(), CollectiveError> {
        if (rank as usize) < self.world_size() {
            return Ok(());
        }
        let detail = format!("{what} {rank} is not in a group of {} ranks", self.world_size());
        Err(self.refused(ErrorKind::Invalid, kind.name(), detail))
    }

    fn check_blocks(
        &self,
        kind: Kind,
        what: &str,
        whole: &Buffer,
        block: &Buffer,
    ) -> Result<(), CollectiveError> {
        if whole.bytes() == block.bytes() * self.world_size() {
            return Ok(());
        }
        let detail = format!(
            "the {what} has {} bytes; expected {} ranks times {}",
            whole.bytes(),
            self.world_size(),
            block.bytes()
        );
        Err(self.refused(ErrorKind::Invalid, kind.name(), detail))
    }
}
