//! Receiving side of tree links: frames of neighbors, and payloads that are read from the segment of a
//! neighbor on this machine.

use std::io;

use fabric::shm::View;

use super::{TreeLinks, is_read_in_place};
use crate::driver::fault::Fault;
use crate::driver::node::Node;
use crate::driver::operations::Operations;
use hfreduce_core::credit::{CLASSES, class};
use hfreduce_core::error::AbortReason;
use hfreduce_core::tree::{Partial, Violation};
use hfreduce_core::{DataHead, Place};
use hfreduce_kernels::Store;
use hfreduce_shm::peer_memory::{MappingListener, PeerMemory};
use hfreduce_transport::transport::{Payload, Received};
use hfreduce_transport::wire::{Frame, Head};

impl TreeLinks {
    /// Handles one arrival on a link; false if there is none.
    pub(in crate::driver) fn receive(
        &mut self,
        node: &Node,
        at: usize,
        operations: &Operations,
    ) -> Result<bool, Fault> {
        let link = &mut self.links[at];
        if link.closed {
            return Ok(false);
        }
        match link.transport.receive_next(&node.poller) {
            Ok(None) => return Ok(false),
            Ok(Some(Received::Head(head))) => {
                for key in link.transport.take_copied().into_iter().flatten() {
                    self.core.sent(key);
                }
                self.receive_head(node, at, &head, operations)?;
            }
            Ok(Some(Received::Payload((head, place)))) => self.arrived(node, at, &head, place)?,
            Ok(Some(Received::Owned(bytes))) => {
                let cause = AbortReason::decode(&bytes, node.rank());
                return Err(Fault::Reported(Box::new(cause), at));
            }
            Err(error) => {
                self.retire(node, at, &error)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Retires a link that has ended: a fault unless the peer had closed it.
    fn retire(&mut self, node: &Node, at: usize, error: &io::Error) -> Result<(), Fault> {
        if node.shm.is_aborted() {
            return Err(Fault::Recorded);
        }
        let link = &mut self.links[at];
        link.transport.forget(&node.poller);
        link.closed = true;
        link.due.clear();
        if !link.transport.peer_closed() {
            return Err(node.lost_peer(link.peer_rank, error));
        }
        self.peer_closed = true;
        Ok(())
    }

    fn arrived(
        &mut self,
        node: &Node,
        at: usize,
        head: &DataHead,
        place: Place,
    ) -> Result<(), Fault> {
        self.core.arrived(at, head, place).map_err(|why| self.violation(node, at, why))
    }

    fn receive_head(
        &mut self,
        node: &Node,
        at: usize,
        head: &Head,
        operations: &Operations,
    ) -> Result<(), Fault> {
        if head.credits != [0; CLASSES] {
            self.core.credits(at, head.credits).map_err(|why| self.violation(node, at, why))?;
        }
        let link = &mut self.links[at];
        match head.frame {
            Frame::Data(data) => self.receive_data(node, at, data, head.mapped, operations)?,
            Frame::Credit => {}
            Frame::Heartbeat { sequence, fingerprint, waiting_for } => {
                link.peer_progress = Some((sequence, waiting_for));
                self.core
                    .compare(sequence, fingerprint)
                    .map_err(|why| self.violation(node, at, why))?;
            }
            Frame::Abort => link.transport.body_owned(head.payload_bytes),
            // Frames of another stream were sent before its close frame, which has not arrived yet.
            Frame::Close { next } if link.transport.peer_closed() => {
                link.end_sequence = Some(next);
                self.peer_closed = true;
            }
            Frame::Close { .. } => {}
            Frame::MappingOffer { token } => {
                let rank = link.peer_rank;
                let listener = &mut self.mapping_listener;
                if map_segment(&mut link.peer_memory, listener, token, rank) {
                    let ready = Head::bare(Frame::MappingReady);
                    link.transport.push(&ready, Payload::Owned(vec![]), None);
                    // If it fails, the next reader of the link detects it.
                    self.flush(node, at);
                }
            }
            Frame::MappingReady => link.peer_memory.mapped(),
            Frame::Offer { .. } | Frame::Grant { .. } | Frame::Piece { .. } => {
                let why = "a point-to-point frame arrived at a tree link".to_owned();
                return Err(self.violation(node, at, Violation::Protocol(why)));
            }
        }
        Ok(())
    }

    fn receive_data(
        &mut self,
        node: &Node,
        at: usize,
        data: DataHead,
        mapped: Option<u64>,
        operations: &Operations,
    ) -> Result<(), Fault> {
        let place = self.core.place(at, &data).map_err(|why| self.violation(node, at, why))?;
        let slot = match place {
            Place::Slot(slot) => {
                let class = class(data.tree, data.stage);
                Some(Partial { link: at, class, slot })
            }
            Place::Direct => None,
        };
        let link = &mut self.links[at];
        if let Some(slot) = &slot {
            link.peer_memory.forget_partial(slot);
        }
        if let (Some(offset), Some(slot), true) = (mapped, &slot, is_read_in_place(&data)) {
            record_partial(&mut link.peer_memory, slot, offset, data.bytes)
                .map_err(|why| node.violation(link.peer_rank, why))?;
            link.transport.read_in_place(data.bytes);
            return self.arrived(node, at, &data, place);
        }
        let memory = match &slot {
            Some(slot) => self.pools.place_mut(slot),
            None => match operations.find_key((data.sequence, data.chunk)) {
                Some((op, chunk, number)) => operations.active[op].place(node, number, &chunk),
                None => return Ok(()),
            },
        };
        let Some(offset) = mapped else {
            // SAFETY: a slot or result buffer that the core has given to this frame alone: both
            // hold a whole chunk and stay until the frame has arrived or the communicator is
            // aborted (then `abort` detaches the transport first).
            unsafe { link.transport.body(memory, data.bytes, (data, place)) };
            return Ok(());
        };
        // SAFETY: as above.
        unsafe { copy_mapped(&link.peer_memory, offset, memory, data.bytes) }
            .map_err(|why| node.violation(link.peer_rank, why))?;
        link.transport.copied(data.bytes);
        self.arrived(node, at, &data, place)
    }
}

/// Maps the segment that `rank` offers; false if that is impossible.
fn map_segment(
    memory: &mut PeerMemory,
    listener: &mut MappingListener,
    token: u64,
    rank: u32,
) -> bool {
    let bytes = memory.peer_segment_bytes;
    match listener.take(token).and_then(|fd| View::open(&fd, bytes)) {
        Ok(view) => {
            memory.view = Some(view);
            true
        }
        Err(error) => {
            tracing::info!(%error, rank, "cannot map the segment of a neighbor: payloads use TCP");
            false
        }
    }
}

/// Records the offset of a partial sum in a neighbor's segment.
fn record_partial(
    memory: &mut PeerMemory,
    partial: &Partial,
    offset: u64,
    bytes: usize,
) -> Result<(), Violation> {
    let slot_bytes = memory.slot_bytes;
    if memory.view.as_ref().and_then(|view| view.at(offset, slot_bytes)).is_none() {
        return Err(invalid(offset, bytes));
    }
    let mapped_partials = &mut memory.mapped_partials[partial.class];
    let slot = partial.slot as usize;
    mapped_partials.resize(mapped_partials.len().max(slot + 1), None);
    mapped_partials[slot] = Some(offset);
    Ok(())
}

/// Copies a mapped payload.
///
/// # Safety
/// `place` must be writable for `bytes` and exclusive.
unsafe fn copy_mapped(
    memory: &PeerMemory,
    offset: u64,
    place: *mut u8,
    bytes: usize,
) -> Result<(), Violation> {
    let source = memory.view.as_ref().and_then(|view| view.at(offset, bytes));
    let source = source.ok_or_else(|| invalid(offset, bytes))?;
    // SAFETY: the view holds the bytes and their owner keeps them unchanged until they are
    // acknowledged; otherwise only the data is wrong. The destination does not overlap the view: it
    // is this rank's segment or pool.
    unsafe { hfreduce_kernels::copy_raw(Store::Cached, source, place, bytes) };
    Ok(())
}

fn invalid(offset: u64, bytes: usize) -> Violation {
    Violation::Protocol(format!("invalid offset {offset} of {bytes} mapped bytes"))
}
