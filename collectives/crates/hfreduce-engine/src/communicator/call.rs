//! Calls of operations: one description for all of them, which is validated here.

use std::time::Duration;

use super::{Communicator, TAG_MAX, Work};
use crate::operation::{Buffer, Operation, Transfer};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_core::matching::ANY_RANK;
use hfreduce_core::{DType, Determinism, Fingerprint, Kind, ReduceOp};

/// A call of an operation, however it was made: from C, from Python, on the memory of a GPU.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The operation.
    pub kind: Kind,
    /// Type of the elements.
    pub dtype: DType,
    /// Reduction operator, if the operation reduces.
    pub op: ReduceOp,
    /// The root, if the operation has one.
    pub root: u32,
    /// The other rank of a message. None: receives the first message of any rank, which
    /// [`Work::source`] returns.
    pub peer: Option<u32>,
    /// Tag of a message, at most [`TAG_MAX`].
    pub tag: u64,
    /// Elements for each rank and from each rank, if it is an alltoall.
    pub counts: [&'a [usize]; 2],
    /// Digest of the sizes of fused arrays, see [`hfreduce_core::fused_shape`]; 0 for one array.
    pub shape: u64,
    /// The input; [`Kind::blocks`] is its length. A rank without input ignores it.
    pub input: Buffer,
    /// The output, likewise; operations in place write to the input instead.
    pub output: Buffer,
    /// Time after which the operation fails.
    pub timeout: Duration,
    /// The caller waits immediately: the background thread is not woken.
    pub lazy: bool,
}

impl Call<'_> {
    /// A call without memory. The fields that only some operations have are zero.
    pub fn new(kind: Kind, dtype: DType, timeout: Duration, lazy: bool) -> Self {
        Self {
            kind,
            dtype,
            op: ReduceOp::Sum,
            root: 0,
            peer: None,
            tag: 0,
            counts: [&[], &[]],
            shape: 0,
            input: Buffer::default(),
            output: Buffer::default(),
            timeout,
            lazy,
        }
    }
}

impl Communicator {
    /// Starts an operation.
    ///
    /// # Errors
    /// Invalid arguments, or a broken communicator.
    pub fn call(&self, mut call: Call<'_>) -> Result<Work, CollectiveError> {
        let kind = call.kind;
        if kind.is_in_place() {
            call.output = call.input.clone();
        }
        let refused = |detail| self.refused(ErrorKind::Invalid, kind.name(), detail);
        let count = self.check(&call).map_err(refused)?;
        let transfers = self.transfers(&call).map_err(refused)?;
        let fingerprint = self.fingerprint(&call, count);
        let Call { input, output, timeout, lazy, .. } = call;
        let operation = Operation { fingerprint, input, output, transfers };
        // A message must move although its caller may first wait for another one.
        self.submit(operation, timeout, lazy && !kind.is_message())
    }

    /// Validates everything except the parts of an alltoall; returns the elements of one block.
    fn check(&self, call: &Call<'_>) -> Result<u64, String> {
        let Call { kind, dtype, op, root, tag, input, output, .. } = call;
        if kind.reduces() && !op.supports(*dtype) {
            return Err(format!("{op} is not defined for {dtype}; use another type or operation"));
        }
        if kind.has_root() {
            self.check_rank("root", *root)?;
        }
        if kind.is_message() {
            let peer = call.peer.unwrap_or(ANY_RANK);
            if call.peer.is_some() || *kind == Kind::Send {
                self.check_rank("peer", peer)?;
            }
            if peer == self.rank() || *tag > TAG_MAX {
                return Err(format!(
                    "peer {peer} (this is rank {}), tag {tag}: a rank cannot send to \
                     itself, and tags end at {TAG_MAX}",
                    self.rank()
                ));
            }
        }
        if *kind == Kind::Alltoall {
            return Ok(0);
        }
        let (inputs, outputs) = kind.blocks(self.rank() == *root, self.world_size());
        let (block, name, whole, blocks) = match kind {
            Kind::ReduceScatter | Kind::Scatter => (output, "input", input, inputs),
            _ => (input, "output", output, outputs),
        };
        if blocks > 0 && whole.bytes() != block.bytes() * blocks {
            return Err(format!(
                "the {name} has {} bytes; expected {blocks} ranks times {}",
                whole.bytes(),
                block.bytes()
            ));
        }
        if !block.bytes().is_multiple_of(dtype.size_bytes()) {
            let bytes = block.bytes();
            return Err(format!("{bytes} bytes are not a multiple of the size of {dtype}"));
        }
        Ok((block.bytes() / dtype.size_bytes()) as u64)
    }

    fn check_rank(&self, name: &str, rank: u32) -> Result<(), String> {
        if (rank as usize) < self.world_size() {
            return Ok(());
        }
        Err(format!("{name} {rank} is not in a group of {} ranks", self.world_size()))
    }

    /// Transfers between two ranks each, and the copy of this rank's own block.
    fn transfers(&self, call: &Call<'_>) -> Result<Vec<Transfer>, String> {
        let Call { kind, root, tag, input, output, .. } = call;
        let transfer =
            |peer, sends, offset, bytes| Transfer { peer, sends, offset, bytes, tag: *tag };
        let is_root = self.rank() == *root;
        let at = |rank: u32, bytes: usize| rank as usize * bytes;
        Ok(match kind {
            Kind::Gather if is_root => {
                let bytes = input.bytes();
                input.copy_to(0, output, at(*root, bytes), bytes);
                let receive = |peer| transfer(peer, false, at(peer, bytes), bytes);
                self.others().map(receive).collect()
            }
            Kind::Scatter if is_root => {
                let bytes = output.bytes();
                input.copy_to(at(*root, bytes), output, 0, bytes);
                self.others().map(|peer| transfer(peer, true, at(peer, bytes), bytes)).collect()
            }
            Kind::Gather => vec![transfer(*root, true, 0, input.bytes())],
            Kind::Scatter => vec![transfer(*root, false, 0, output.bytes())],
            Kind::Send | Kind::Recv => {
                let peer = call.peer.unwrap_or(ANY_RANK);
                vec![transfer(peer, *kind == Kind::Send, 0, input.bytes())]
            }
            Kind::Alltoall => self.exchange(call)?,
            _ => Vec::new(),
        })
    }

    /// Transfers of an alltoall, in which every rank starts with the next rank, so that not all
    /// send to rank 0 first.
    fn exchange(&self, call: &Call<'_>) -> Result<Vec<Transfer>, String> {
        let Call { input, output, counts, dtype, .. } = call;
        let sends = self.split("input", input, counts[0], *dtype)?;
        let receives = self.split("output", output, counts[1], *dtype)?;
        let own = self.rank() as usize;
        if sends[own].1 != receives[own].1 {
            return Err(format!(
                "rank {own} sends {} elements to itself and receives {}",
                counts[0][own], counts[1][own]
            ));
        }
        input.copy_to(sends[own].0, output, receives[own].0, sends[own].1);
        let mut transfers = Vec::with_capacity(2 * sends.len());
        for peer in self.others() {
            for (sends, parts) in [(false, &receives), (true, &sends)] {
                let (offset, bytes) = parts[peer as usize];
                transfers.push(Transfer { peer, sends, offset, bytes, tag: 0 });
            }
        }
        Ok(transfers)
    }

    /// The other ranks, starting with the next one.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (own, world) = (self.rank(), self.world_size() as u32);
        (1..world).map(move |step| (own + step) % world)
    }

    /// Offset and size of each rank's part, in bytes; the counts must fill the buffer.
    fn split(
        &self,
        name: &str,
        buffer: &Buffer,
        counts: &[usize],
        dtype: DType,
    ) -> Result<Vec<(usize, usize)>, String> {
        let mut offset = 0_usize;
        let mut parts = Vec::with_capacity(counts.len());
        for count in counts {
            let bytes = count.saturating_mul(dtype.size_bytes());
            parts.push((offset, bytes));
            offset = offset.saturating_add(bytes);
        }
        if counts.len() != self.world_size() || offset != buffer.bytes() {
            return Err(format!(
                "{} {name} counts make {offset} bytes; the {name} has {} and there are {} ranks",
                counts.len(),
                buffer.bytes(),
                self.world_size()
            ));
        }
        Ok(parts)
    }

    fn fingerprint(&self, call: &Call<'_>, count: u64) -> Fingerprint {
        let Call { kind, dtype, shape, .. } = *call;
        let op = if kind.reduces() { call.op } else { ReduceOp::Sum };
        let modes = |modes: Determinism| match self.identity().placement.nodes().len() {
            0 | 1 => modes.of(kind, dtype, op),
            _ => modes.between_nodes(kind, dtype, op),
        };
        Fingerprint {
            kind,
            dtype: dtype.code(),
            element_bytes: dtype.size_bytes() as u8,
            op: op.code(),
            root: if kind.has_root() { call.root } else { 0 },
            count,
            shape,
            modes: modes(self.identity().determinism),
        }
    }
}
