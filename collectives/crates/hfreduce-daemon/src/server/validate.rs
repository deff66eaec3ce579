//! A call as it came: everything in it is looked at before anything is done.

use fabric::shm::Segment;

use crate::protocol::{Call, Region};
use hfreduce_core::matching::ANY_RANK;
use hfreduce_core::{DType, ReduceOp};
use hfreduce_core::{Fingerprint, Kind};
use hfreduce_engine::communicator::TAG_MAX;
use hfreduce_engine::operation::{Buffer, Operation};

/// The operation of a call of rank `rank`, with its buffers where they are in the arena.
///
/// # Errors
/// What of it cannot be, in words.
pub fn operation(
    call: &Call,
    arena: &Segment,
    rank: u32,
    world: usize,
) -> Result<Operation, String> {
    let fingerprint = Fingerprint::decode(&call.fingerprint).ok_or("a kind that does not exist")?;
    sizes(&fingerprint, call, rank, world)?;
    for transfer in &call.transfers {
        let side = if transfer.sends { call.input } else { call.output };
        let inside = transfer.offset.checked_add(transfer.bytes).is_some_and(|e| e <= side.bytes);
        let anybody =
            transfer.peer == ANY_RANK && fingerprint.kind == Kind::Recv && !transfer.sends;
        let peer = anybody || (transfer.peer != rank && (transfer.peer as usize) < world);
        // Those of collectives are given where they are submitted.
        let tagged = matches!(fingerprint.kind, Kind::Send | Kind::Recv);
        if !inside || !peer || (tagged && transfer.tag > TAG_MAX) {
            return Err(format!("{transfer:?} of {} bytes in a world of {world}", side.bytes));
        }
    }
    if call.pipelined && !call.transfers.is_empty() {
        return Err(format!("{} on memory that is not there yet", fingerprint.describe()));
    }
    let (input, output) = (buffer(call.input, arena)?, buffer(call.output, arena)?);
    Ok(Operation { fingerprint, input, output, transfers: call.transfers.clone() })
}

/// Types and lengths fit each other.
fn sizes(fingerprint: &Fingerprint, call: &Call, rank: u32, world: usize) -> Result<(), String> {
    let said = || format!("{} with {:?} and {:?}", fingerprint.describe(), call.input, call.output);
    let dtype = DType::from_code(fingerprint.dtype).ok_or_else(said)?;
    let element = usize::from(fingerprint.element_bytes);
    if element != dtype.size_bytes() || fingerprint.root as usize >= world {
        return Err(said());
    }
    if fingerprint.kind.reduces() {
        let op = ReduceOp::from_code(fingerprint.op).ok_or_else(said)?;
        if !op.supports(dtype) {
            return Err(said());
        }
    }
    let one = usize::try_from(fingerprint.count).ok().and_then(|count| count.checked_mul(element));
    let one = one.ok_or_else(said)?;
    let all = one.checked_mul(world).ok_or_else(said)?;
    let is_root = fingerprint.root == rank;
    let wanted = match fingerprint.kind {
        Kind::Allreduce | Kind::Broadcast | Kind::Reduce | Kind::Send | Kind::Recv => (one, one),
        Kind::Allgather => (one, all),
        Kind::ReduceScatter => (all, one),
        Kind::Gather => (one, if is_root { all } else { 0 }),
        Kind::Scatter => (if is_root { all } else { 0 }, one),
        Kind::Barrier => (0, 0),
        Kind::Alltoall => (call.input.bytes, call.output.bytes),
    };
    // What there is to say to whom: at most one thing each way.
    let transfers = match fingerprint.kind {
        Kind::Send | Kind::Recv => 1..=1,
        Kind::Gather | Kind::Scatter | Kind::Alltoall => 0..=2 * world,
        _ => 0..=0,
    };
    match wanted == (call.input.bytes, call.output.bytes)
        && transfers.contains(&call.transfers.len())
    {
        true => Ok(()),
        false => Err(said()),
    }
}

fn buffer(region: Region, arena: &Segment) -> Result<Buffer, String> {
    let size = arena.bytes();
    let place = arena.at(region.offset, region.bytes);
    let place = place.ok_or_else(|| format!("{region:?} in an arena of {size} bytes"))?;
    // SAFETY: the range lies in the arena, which its session keeps until the operation has ended.
    // That the rank leaves it alone meanwhile is its own concern: bytes are all that can go wrong.
    Ok(unsafe { Buffer::new([(place, region.bytes)]) })
}
