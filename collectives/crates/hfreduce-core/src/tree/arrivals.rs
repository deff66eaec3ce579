//! Arriving frames: whether a chunk expects them and where their payload is stored. A frame that
//! arrives before its chunk is active waits in a slot.

use super::*;

impl TreeCore {
    /// Handles the head of a frame: returns the destination of its payload.
    ///
    /// # Errors
    /// The violation of the peer.
    pub fn place(&mut self, link: usize, head: &DataHead) -> Result<Place, Violation> {
        if head.tree > 1 || !Self::owns(self.channel, head.chunk) {
            return Err(Violation::Protocol(format!("chunk {} is not of this link", head.chunk)));
        }
        if self.fingerprints.front().is_some_and(|(oldest, _)| head.sequence < *oldest) {
            // The fingerprint of every operation that has not ended here is kept.
            return Err(Violation::Protocol(format!(
                "chunk {} of operation {} arrived after its end",
                head.chunk, head.sequence
            )));
        }
        self.compare(head.sequence, head.fingerprint)?;
        if !self.links[link].receive[head.class()].arrive() {
            return Err(Violation::Protocol("a frame arrived without credit".into()));
        }
        match self.find(head.key()) {
            Some(at) => {
                self.admit(at, link, head)?;
                if head.stage == Stage::Down {
                    self.chunks[at].receiving = true;
                    return Ok(Place::Direct);
                }
            }
            None if self.activated >= Some(head.key()) => {
                return Err(Violation::Protocol(format!(
                    "chunk {} of operation {} arrived twice",
                    head.chunk, head.sequence
                )));
            }
            None => {}
        }
        let slot = self.links[link].receive[head.class()].take();
        slot.map(Place::Slot)
            .ok_or_else(|| Violation::Protocol("a frame arrived and no slot is free".into()))
    }

    /// Handles the end of a payload at the destination that [`TreeCore::place`] returned.
    ///
    /// # Errors
    /// The violation of the peer.
    pub fn arrived(&mut self, link: usize, head: &DataHead, place: Place) -> Result<(), Violation> {
        if self.broken {
            return Ok(());
        }
        if let Place::Slot(_) = place {
            // This rank may have started the operation while the payload was in flight.
            self.compare(head.sequence, head.fingerprint)?;
        }
        match (self.find(head.key()), place) {
            (Some(at), Place::Slot(_)) => {
                // The chunk may have become active while the payload was in flight.
                self.admit(at, link, head)?;
                self.accept(at, link, head, place);
            }
            (Some(at), Place::Direct) => self.accept(at, link, head, place),
            (None, Place::Slot(slot)) => {
                let waiting = self.early.entry((head.key(), head.stage)).or_default();
                if waiting.iter().any(|early| early.link == link) {
                    return Err(Violation::Protocol(format!("chunk {} arrived twice", head.chunk)));
                }
                waiting.push(Early { link, head: *head, slot });
            }
            (None, Place::Direct) => {}
        }
        Ok(())
    }

    /// Checks that the chunk expects this frame.
    pub(super) fn admit(&self, at: usize, link: usize, head: &DataHead) -> Result<(), Violation> {
        let state = &self.chunks[at];
        let flow = self.flow(state);
        let expected = head.tree == state.chunk.tree
            && match head.stage {
                Stage::Up => {
                    let from = flow.away.iter().position(|away| *away == link);
                    state.chunk.reduces() && from.is_some_and(|at| state.partials[at].is_none())
                }
                Stage::Down => {
                    state.onward != Onward::Nowhere
                        && flow.toward == Some(link)
                        && !state.result
                        && !state.receiving
                }
            };
        if !expected {
            return Err(Violation::Protocol(format!(
                "chunk {} of operation {} in stage {:?} arrived from a node that does not send it",
                head.chunk, head.sequence, head.stage
            )));
        }
        let bytes = state.chunk.bytes_in(head.stage);
        if head.bytes != bytes {
            return Err(Violation::Protocol(format!(
                "chunk {} of operation {} has {} bytes instead of {bytes}",
                head.chunk, head.sequence, head.bytes
            )));
        }
        Ok(())
    }

    pub(super) fn accept(&mut self, at: usize, link: usize, head: &DataHead, place: Place) {
        let key = self.chunks[at].key;
        match (head.stage, place) {
            (Stage::Up, Place::Slot(slot)) => {
                let from = self.flow(&self.chunks[at]).away.iter().position(|away| *away == link);
                if let Some(from) = from {
                    self.chunks[at].partials[from] = Some(slot);
                    self.chunks[at].missing -= 1;
                }
            }
            (Stage::Up, Place::Direct) => {}
            (Stage::Down, Place::Direct) => {
                self.release(link, head.class(), None);
                self.chunks[at].result = true;
            }
            (Stage::Down, Place::Slot(slot)) => {
                let from = Partial { link, class: head.class(), slot };
                self.actions.push_back(Action::Move { key, from });
                self.release(link, head.class(), Some(slot));
                self.chunks[at].result = true;
            }
        }
        self.advance(at);
    }
}
