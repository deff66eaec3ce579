//! Messages between two ranks: who may send what when. Pure, like everything here.
//!
//! ```text
//! sender    Offer(tag, length) ──▶          nothing but this small word is ever unexpected
//! receiver          ◀── Grant               once a receive of that tag is posted
//! sender    Piece, Piece, … ──▶             straight into the receiver's memory
//! ```
//! Offers and receives of one tag pair up in order. Lengths and fingerprints must be equal.

use std::collections::{BTreeMap, VecDeque};

use super::fingerprint::{Fingerprint, Kind};
use super::tree::Violation;

/// Offers without a grant that one rank may have at another.
pub const OFFERS_MAX: usize = 1024;

/// Names one transfer of one operation on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket {
    /// The operation, as this rank counts them.
    pub operation: u64,
    /// Which of its transfers.
    pub transfer: usize,
}

/// What is said about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Letter {
    /// What pairs it.
    pub tag: u64,
    /// Its length.
    pub bytes: u64,
    /// What the operation is.
    pub print: Fingerprint,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairAction {
    /// Tell the peer.
    Offer {
        /// To whom.
        peer: u32,
        /// The message's number.
        message: u64,
        /// What it is.
        letter: Letter,
    },
    /// Tell the peer.
    Grant {
        /// To whom.
        peer: u32,
        /// The peer's number for it.
        message: u64,
    },
    /// Send the bytes.
    Stream {
        /// To whom.
        peer: u32,
        /// The message's number.
        message: u64,
        /// What it is.
        ticket: Ticket,
    },
    /// This transfer is complete.
    Complete {
        /// Which.
        ticket: Ticket,
    },
}

#[derive(Debug, Default)]
struct Pair {
    next_message: u64,
    /// Sends that wait for their turn to be offered.
    queued: VecDeque<(Ticket, Letter)>,
    offered: BTreeMap<u64, (Ticket, Letter)>,
    offers: VecDeque<(u64, Letter)>,
    posted: VecDeque<(Ticket, Letter)>,
    arriving: BTreeMap<u64, (Ticket, u64, u64)>,
}

/// All pairs of one rank.
#[derive(Debug, Default)]
pub struct Pairs {
    pairs: BTreeMap<u32, Pair>,
    actions: VecDeque<PairAction>,
}

impl Pairs {
    /// The next thing to do.
    pub fn poll(&mut self) -> Option<PairAction> {
        self.actions.pop_front()
    }

    /// We want to send.
    pub fn send(&mut self, peer: u32, ticket: Ticket, letter: Letter) {
        self.pairs.entry(peer).or_default().queued.push_back((ticket, letter));
        self.offer(peer);
    }

    /// We want to receive.
    ///
    /// # Errors
    /// [`Violation`] if what the peer offers does not fit.
    pub fn receive(&mut self, peer: u32, ticket: Ticket, letter: Letter) -> Result<(), Violation> {
        let pair = self.pairs.entry(peer).or_default();
        match pair.offers.iter().position(|(_, offer)| offer.tag == letter.tag) {
            Some(at) => match pair.offers.remove(at) {
                Some((message, offer)) => self.grant(peer, message, offer, ticket, letter),
                None => Ok(()),
            },
            None => {
                pair.posted.push_back((ticket, letter));
                Ok(())
            }
        }
    }

    /// The peer wants to send.
    ///
    /// # Errors
    /// [`Violation`] if it does not fit, or the peer offers too much.
    pub fn offered(&mut self, peer: u32, message: u64, offer: Letter) -> Result<(), Violation> {
        let pair = self.pairs.entry(peer).or_default();
        match pair.posted.iter().position(|(_, letter)| letter.tag == offer.tag) {
            Some(at) => match pair.posted.remove(at) {
                Some((ticket, letter)) => self.grant(peer, message, offer, ticket, letter),
                None => Ok(()),
            },
            None if pair.offers.len() >= OFFERS_MAX => {
                Err(Violation::Protocol(format!("more than {OFFERS_MAX} offers wait here")))
            }
            None => {
                pair.offers.push_back((message, offer));
                Ok(())
            }
        }
    }

    /// The peer wants our message now.
    ///
    /// # Errors
    /// [`Violation`] if we did not offer it.
    pub fn granted(&mut self, peer: u32, message: u64) -> Result<(), Violation> {
        let pair = self.pairs.entry(peer).or_default();
        let Some((ticket, letter)) = pair.offered.remove(&message) else {
            return Err(Violation::Protocol(format!("message {message} was granted, not offered")));
        };
        self.actions.push_back(if letter.bytes == 0 {
            PairAction::Complete { ticket }
        } else {
            PairAction::Stream { peer, message, ticket }
        });
        self.offer(peer);
        Ok(())
    }

    /// A piece of the peer's message begins: which transfer it belongs to and where in it.
    ///
    /// # Errors
    /// [`Violation`] if it was not granted or is too long.
    pub fn piece(
        &mut self,
        peer: u32,
        message: u64,
        bytes: u64,
    ) -> Result<(Ticket, u64), Violation> {
        let arriving = self.pairs.get(&peer).and_then(|pair| pair.arriving.get(&message));
        match arriving {
            Some((ticket, have, all)) if bytes > 0 && have + bytes <= *all => Ok((*ticket, *have)),
            _ => {
                Err(Violation::Protocol(format!("{bytes} bytes of message {message} came unasked")))
            }
        }
    }

    /// The piece is in its place.
    pub fn arrived(&mut self, peer: u32, message: u64, bytes: u64) {
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        let Some((ticket, have, all)) = pair.arriving.get_mut(&message) else { return };
        *have += bytes;
        if have == all {
            self.actions.push_back(PairAction::Complete { ticket: *ticket });
            pair.arriving.remove(&message);
        }
    }

    fn offer(&mut self, peer: u32) {
        let pair = self.pairs.entry(peer).or_default();
        while pair.offered.len() < OFFERS_MAX {
            let Some((ticket, letter)) = pair.queued.pop_front() else { return };
            let message = pair.next_message;
            pair.next_message += 1;
            pair.offered.insert(message, (ticket, letter));
            self.actions.push_back(PairAction::Offer { peer, message, letter });
        }
    }

    fn grant(
        &mut self,
        peer: u32,
        message: u64,
        offer: Letter,
        ticket: Ticket,
        letter: Letter,
    ) -> Result<(), Violation> {
        // Ranks may give an operation different lengths for each other: then both sides of a pair
        // have to agree on that of their message.
        if !same(&offer.print, &letter.print) || offer.bytes != letter.bytes {
            return Err(Violation::Mismatch {
                sequence: letter.tag & (u64::MAX >> 1),
                ours: of_length(letter),
                theirs: of_length(offer),
            });
        }
        self.actions.push_back(PairAction::Grant { peer, message });
        if letter.bytes == 0 {
            self.actions.push_back(PairAction::Complete { ticket });
        } else {
            let pair = self.pairs.entry(peer).or_default();
            pair.arriving.insert(message, (ticket, 0, letter.bytes));
        }
        Ok(())
    }
}

/// A send fits a receive of the same type and count; everything else fits its like.
fn same(theirs: &Fingerprint, ours: &Fingerprint) -> bool {
    match (theirs.kind, ours.kind) {
        (Kind::Send, Kind::Recv) => theirs.dtype == ours.dtype && theirs.count == ours.count,
        _ => theirs == ours,
    }
}

/// For messages: what was called, with the length of this message where it has none of its own.
fn of_length(letter: Letter) -> Fingerprint {
    let Letter { bytes, print, .. } = letter;
    match print.kind {
        Kind::Alltoall => {
            Fingerprint { count: bytes / u64::from(print.element_bytes.max(1)), ..print }
        }
        _ => print,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Determinism;

    fn letter(kind: Kind, tag: u64, bytes: u64) -> Letter {
        let print = Fingerprint {
            kind,
            dtype: 0,
            element_bytes: 1,
            op: 0,
            root: 0,
            count: bytes,
            shape: 0,
            modes: Determinism::DEFAULT,
        };
        Letter { tag, bytes, print }
    }

    fn ticket(operation: u64) -> Ticket {
        Ticket { operation, transfer: 0 }
    }

    fn actions(pairs: &mut Pairs) -> Vec<PairAction> {
        std::iter::from_fn(|| pairs.poll()).collect()
    }

    #[test]
    fn messages_of_one_tag_pair_up_in_order_whoever_is_first() {
        let mut pairs = Pairs::default();
        pairs.offered(3, 10, letter(Kind::Send, 7, 4)).unwrap();
        pairs.offered(3, 11, letter(Kind::Send, 8, 4)).unwrap();
        pairs.receive(3, ticket(1), letter(Kind::Recv, 8, 4)).unwrap();
        pairs.receive(3, ticket(2), letter(Kind::Recv, 7, 4)).unwrap();
        pairs.receive(3, ticket(4), letter(Kind::Recv, 7, 4)).unwrap();
        pairs.offered(3, 12, letter(Kind::Send, 7, 4)).unwrap();
        let grants = [11, 10, 12].map(|message| PairAction::Grant { peer: 3, message });
        assert_eq!(actions(&mut pairs), grants);
        assert_eq!(pairs.piece(3, 10, 3), Ok((ticket(2), 0)));
        pairs.arrived(3, 10, 3);
        assert!(pairs.piece(3, 10, 2).is_err() && pairs.piece(2, 10, 1).is_err());
        assert_eq!(pairs.piece(3, 10, 1), Ok((ticket(2), 3)));
        pairs.arrived(3, 10, 1);
        assert_eq!(actions(&mut pairs), [PairAction::Complete { ticket: ticket(2) }]);
    }

    #[test]
    fn nothing_is_sent_before_it_is_granted() {
        let mut pairs = Pairs::default();
        let sent = letter(Kind::Send, 7, 4);
        pairs.send(1, ticket(0), sent);
        assert_eq!(actions(&mut pairs), [PairAction::Offer { peer: 1, message: 0, letter: sent }]);
        assert!(pairs.granted(1, 5).is_err());
        pairs.granted(1, 0).unwrap();
        let stream = PairAction::Stream { peer: 1, message: 0, ticket: ticket(0) };
        assert_eq!(actions(&mut pairs), [stream]);
        assert!(pairs.granted(1, 0).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut pairs = Pairs::default();
        pairs.receive(3, ticket(1), letter(Kind::Recv, 8, 4)).unwrap();
        let other = pairs.offered(3, 0, letter(Kind::Send, 8, 5));
        assert!(matches!(other, Err(Violation::Mismatch { .. })));
        // Both call the same; what one sends is not what the other expects.
        let uneven = |bytes| Letter { bytes, tag: 1 << 63 | 5, ..letter(Kind::Alltoall, 0, 0) };
        pairs.receive(5, ticket(2), uneven(8)).unwrap();
        let Err(Violation::Mismatch { sequence, ours, theirs }) = pairs.offered(5, 0, uneven(12))
        else {
            panic!("lengths differ")
        };
        assert_eq!((sequence, ours.count, theirs.count), (5, 8, 12));
        for message in 0..OFFERS_MAX as u64 {
            pairs.offered(4, message, letter(Kind::Send, 1, 1)).unwrap();
        }
        assert!(pairs.offered(4, 9999, letter(Kind::Send, 1, 1)).is_err());
    }

    #[test]
    fn empty_messages_still_meet() {
        let mut pairs = Pairs::default();
        pairs.send(1, ticket(0), letter(Kind::Send, 7, 0));
        pairs.granted(1, 0).unwrap();
        pairs.receive(1, ticket(1), letter(Kind::Recv, 7, 0)).unwrap();
        pairs.offered(1, 0, letter(Kind::Send, 7, 0)).unwrap();
        let done: Vec<_> = actions(&mut pairs)
            .into_iter()
            .filter(|action| matches!(action, PairAction::Complete { .. }))
            .collect();
        assert_eq!(done.len(), 2);
    }
}
