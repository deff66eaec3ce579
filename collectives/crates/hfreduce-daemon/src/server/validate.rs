//! Validation of a rank's calls, before anything is done.

use fabric::shm::Segment;

use crate::protocol::{CallRequest, Region};
use hfreduce_core::matching::ANY_RANK;
use hfreduce_core::{DType, ReduceOp};
use hfreduce_core::{Fingerprint, Kind};
use hfreduce_engine::communicator::TAG_MAX;
use hfreduce_engine::operation::{Buffer, Operation};

/// Validates a call of rank `rank`; returns the operation, with its buffers in the arena.
///
/// # Errors
/// What is invalid.
pub fn operation(
    call: &CallRequest,
    arena: &Segment,
    rank: u32,
    world: usize,
) -> Result<Operation, String> {
    let fingerprint = Fingerprint::decode(&call.fingerprint).ok_or("unknown kind")?;
    sizes(&fingerprint, call, rank, world)?;
    for transfer in &call.transfers {
        let side = if transfer.sends { call.input } else { call.output };
        let inside = transfer.offset.checked_add(transfer.bytes).is_some_and(|e| e <= side.bytes);
        let anybody =
            transfer.peer == ANY_RANK && fingerprint.kind == Kind::Recv && !transfer.sends;
        let peer = anybody || (transfer.peer != rank && (transfer.peer as usize) < world);
        // The tags of collectives are assigned when they are submitted.
        let tag = !fingerprint.kind.is_message() || transfer.tag <= TAG_MAX;
        if !inside || !peer || !tag {
            return Err(format!(
                "{transfer:?} of {} bytes in a group of {world} ranks",
                side.bytes
            ));
        }
    }
    if call.pipelined && !call.transfers.is_empty() {
        return Err(format!("{} does not support pipelined buffers", fingerprint.describe()));
    }
    let (input, output) = (buffer(call.input, arena)?, buffer(call.output, arena)?);
    Ok(Operation { fingerprint, input, output, transfers: call.transfers.clone() })
}

/// Checks types and lengths.
fn sizes(
    fingerprint: &Fingerprint,
    call: &CallRequest,
    rank: u32,
    world: usize,
) -> Result<(), String> {
    let mismatch =
        || format!("{} with {:?} and {:?}", fingerprint.describe(), call.input, call.output);
    let dtype = DType::from_code(fingerprint.dtype).ok_or_else(mismatch)?;
    let element = usize::from(fingerprint.element_bytes);
    if element != dtype.size_bytes() || fingerprint.root as usize >= world {
        return Err(mismatch());
    }
    if fingerprint.kind.reduces() {
        let op = ReduceOp::from_code(fingerprint.op).ok_or_else(mismatch)?;
        if !op.supports(dtype) {
            return Err(mismatch());
        }
    }
    let block =
        usize::try_from(fingerprint.count).ok().and_then(|count| count.checked_mul(element));
    let fits = |block: &usize| block.checked_mul(world).is_some();
    let block = block.filter(fits).ok_or_else(mismatch)?;
    let (inputs, outputs) = fingerprint.kind.blocks(fingerprint.root == rank, world);
    let expected = match fingerprint.kind {
        // Ranks send and receive different numbers: the transfers are checked.
        Kind::Alltoall => (call.input.bytes, call.output.bytes),
        _ => (inputs * block, outputs * block),
    };
    // Number of transfers: at most block to and block from each rank.
    let transfers = match fingerprint.kind {
        Kind::Send | Kind::Recv => 1..=1,
        Kind::Gather | Kind::Scatter | Kind::Alltoall => 0..=2 * world,
        _ => 0..=0,
    };
    match expected == (call.input.bytes, call.output.bytes)
        && transfers.contains(&call.transfers.len())
    {
        true => Ok(()),
        false => Err(mismatch()),
    }
}

fn buffer(region: Region, arena: &Segment) -> Result<Buffer, String> {
    let size = arena.bytes();
    let place = arena.at(region.offset, region.bytes);
    let place = place.ok_or_else(|| format!("{region:?} in an arena of {size} bytes"))?;
    // SAFETY: the range is in the arena, which the session keeps until the operation has ended. If
    // the rank accesses it meanwhile, only the data is wrong.
    Ok(unsafe { Buffer::new([(place, region.bytes)]) })
}
