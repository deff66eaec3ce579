//! A call as it came: everything in it is looked at before anything is done.

use fabric::shm::Segment;

use super::{Call, Region};
use crate::communicator::TAG_MAX;
use crate::core::pair::ANY_RANK;
use crate::core::{Fingerprint, Kind};
use crate::operation::{Buffer, DType, Operation, ReduceOp};

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
    let print = Fingerprint::decode(&call.print).ok_or("a kind that does not exist")?;
    sizes(&print, call, rank, world)?;
    for transfer in &call.transfers {
        let side = if transfer.sends { call.input } else { call.output };
        let inside = transfer.offset.checked_add(transfer.bytes).is_some_and(|e| e <= side.bytes);
        let anybody = transfer.peer == ANY_RANK && print.kind == Kind::Recv && !transfer.sends;
        let peer = anybody || (transfer.peer != rank && (transfer.peer as usize) < world);
        // Those of collectives are given where they are submitted.
        let tagged = matches!(print.kind, Kind::Send | Kind::Recv);
        if !inside || !peer || (tagged && transfer.tag > TAG_MAX) {
            return Err(format!("{transfer:?} of {} bytes in a world of {world}", side.bytes));
        }
    }
    if call.paced && !call.transfers.is_empty() {
        return Err(format!("{} on memory that is not there yet", print.describe()));
    }
    let (input, output) = (buffer(call.input, arena)?, buffer(call.output, arena)?);
    Ok(Operation { print, input, output, transfers: call.transfers.clone() })
}

/// Types and lengths fit each other.
fn sizes(print: &Fingerprint, call: &Call, rank: u32, world: usize) -> Result<(), String> {
    let said = || format!("{} with {:?} and {:?}", print.describe(), call.input, call.output);
    let dtype = DType::from_code(print.dtype).ok_or_else(said)?;
    let element = usize::from(print.element_bytes);
    if element != dtype.size_bytes() || print.root as usize >= world {
        return Err(said());
    }
    if print.kind.reduces() {
        let op = ReduceOp::from_code(print.op).ok_or_else(said)?;
        if !op.supports(dtype) {
            return Err(said());
        }
    }
    let one = usize::try_from(print.count).ok().and_then(|count| count.checked_mul(element));
    let one = one.ok_or_else(said)?;
    let all = one.checked_mul(world).ok_or_else(said)?;
    let is_root = print.root == rank;
    let wanted = match print.kind {
        Kind::Allreduce | Kind::Broadcast | Kind::Reduce | Kind::Send | Kind::Recv => (one, one),
        Kind::Allgather => (one, all),
        Kind::ReduceScatter => (all, one),
        Kind::Gather => (one, if is_root { all } else { 0 }),
        Kind::Scatter => (if is_root { all } else { 0 }, one),
        Kind::Barrier => (0, 0),
        Kind::Alltoall => (call.input.bytes, call.output.bytes),
    };
    // What there is to say to whom: at most one thing each way.
    let transfers = match print.kind {
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
