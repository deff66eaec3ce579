//! Matching of point-to-point messages: which rank may send which message when.
//!
//! ```text
//! sender    Offer(tag, length) ──▶          with the bytes, where they are few (eager)
//! receiver          ◀── Grant               once a receive of that tag is posted
//! sender    Piece, Piece, … ──▶             straight into the receiver's memory
//! ```
//! A send completes once it has been granted and its last byte has left. A receiver holds at most
//! [`EAGER_WINDOW_BYTES`] per peer that no receive has matched; the sender counts them.
//!
//! Offers and receives of one tag are matched in order. Lengths and fingerprints must be equal. A
//! receive from [`ANY_RANK`] matches the oldest offer of its tag from any rank.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::fingerprint::Fingerprint;
use super::kind::Kind;
use super::tree::Violation;

/// Maximum number of offers without a grant that one rank may have at another: more than a program
/// has messages in flight, so that none waits behind others that are received later. An offer takes
/// about 100 bytes.
pub const OFFERS_MAX: usize = 1 << 17;

/// Maximum size of a message that is sent with its offer, in bytes.
pub const EAGER_BYTES_MAX: u64 = 8 << 10;
/// Maximum bytes of such messages that one rank may have at another before they are granted.
pub const EAGER_WINDOW_BYTES: u64 = 64 << 10;

/// Peer of a receive that accepts a message from any rank.
pub const ANY_RANK: u32 = u32::MAX;

/// Identifies one transfer of one operation on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransferId {
    /// The operation, as this rank numbers them.
    pub operation: u64,
    /// Index of the transfer in the operation.
    pub transfer: usize,
}

/// Envelope of a message: tag, length and operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The tag by which offer and receive are matched.
    pub tag: u64,
    /// The length.
    pub bytes: u64,
    /// The operation.
    pub fingerprint: Fingerprint,
}

/// Actions for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairAction {
    /// Offer a message to the peer.
    Offer {
        /// The receiver.
        peer: u32,
        /// Number of the message.
        message: u64,
        /// The envelope.
        envelope: Envelope,
        /// The send whose bytes are sent with the offer, if any.
        eager: Option<TransferId>,
    },
    /// Grant a message of the peer.
    Grant {
        /// The sender.
        peer: u32,
        /// The peer's number of the message.
        message: u64,
        /// The receive that takes it.
        ticket: TransferId,
    },
    /// Copy the bytes that were sent with an offer.
    Take {
        /// The sender.
        peer: u32,
        /// The peer's number of the message.
        message: u64,
        /// The receive that takes them.
        ticket: TransferId,
    },
    /// Send the bytes.
    Stream {
        /// The receiver.
        peer: u32,
        /// Number of the message.
        message: u64,
        /// The send.
        ticket: TransferId,
    },
    /// This transfer is complete.
    Complete {
        /// The transfer.
        ticket: TransferId,
    },
}

/// A receive that waits for an offer. Receives from one peer and from any are matched in the order
/// in which they were posted.
#[derive(Clone, Copy, Debug)]
struct Posted {
    order: u64,
    ticket: TransferId,
    envelope: Envelope,
}

/// An offer that waits for a receive.
#[derive(Clone, Copy, Debug)]
struct Offered {
    order: u64,
    message: u64,
    envelope: Envelope,
    /// Its bytes have arrived.
    eager: bool,
}

/// Queue of unmatched entries by tag: entries of one tag are in order, and each tag has a separate
/// queue, so that matching looks at one entry per tag.
#[derive(Debug)]
struct ByTag<T> {
    queues: BTreeMap<u64, VecDeque<T>>,
    len: usize,
}

impl<T> ByTag<T> {
    fn push(&mut self, tag: u64, item: T) {
        self.queues.entry(tag).or_default().push_back(item);
        self.len += 1;
    }

    fn first(&self, tag: u64) -> Option<&T> {
        self.queues.get(&tag)?.front()
    }

    fn pop(&mut self, tag: u64) -> Option<T> {
        let queue = self.queues.get_mut(&tag)?;
        let item = queue.pop_front()?;
        self.len -= 1;
        if queue.is_empty() {
            self.queues.remove(&tag);
        }
        Some(item)
    }
}

impl<T> Default for ByTag<T> {
    fn default() -> Self {
        Self { queues: BTreeMap::new(), len: 0 }
    }
}

#[derive(Debug, Default)]
struct Pair {
    next_message: u64,
    /// Sends that have not been offered yet.
    queued: VecDeque<(TransferId, Envelope)>,
    offered: BTreeMap<u64, (TransferId, Envelope)>,
    /// Offers whose bytes were sent with them.
    eager: BTreeSet<u64>,
    eager_bytes: u64,
    offers: ByTag<Offered>,
    /// Bytes that arrived with these offers.
    held_bytes: u64,
    posted: ByTag<Posted>,
    arriving: BTreeMap<u64, (TransferId, u64, u64)>,
}

/// Message matching of one rank with all its peers.
#[derive(Debug, Default)]
pub struct Pairs {
    pairs: BTreeMap<u32, Pair>,
    /// Receives from any rank.
    posted_to_any: ByTag<Posted>,
    /// Counts receives and offers in the order in which they arrive.
    order: u64,
    actions: VecDeque<PairAction>,
}

impl Pairs {
    /// Returns the next action.
    pub fn poll(&mut self) -> Option<PairAction> {
        self.actions.pop_front()
    }

    /// Posts a send.
    pub fn send(&mut self, peer: u32, ticket: TransferId, envelope: Envelope) {
        self.pairs.entry(peer).or_default().queued.push_back((ticket, envelope));
        self.offer(peer);
    }

    /// Posts a receive from `peer` or from [`ANY_RANK`].
    ///
    /// # Errors
    /// The peer whose offer does not match, and why.
    pub fn receive(
        &mut self,
        peer: u32,
        ticket: TransferId,
        envelope: Envelope,
    ) -> Result<(), (u32, Violation)> {
        let posted = Posted { order: self.next_order(), ticket, envelope };
        if let Some((peer, offer)) = self.take_offer(peer, envelope.tag) {
            return self.grant(peer, offer, posted).map_err(|why| (peer, why));
        }
        match peer {
            ANY_RANK => self.posted_to_any.push(envelope.tag, posted),
            peer => self.pairs.entry(peer).or_default().posted.push(envelope.tag, posted),
        }
        Ok(())
    }

    /// Handles an offer of the peer; `eager`: its bytes have arrived.
    ///
    /// # Errors
    /// [`Violation`] if it does not match a receive, or the peer offers too much.
    pub fn offered(
        &mut self,
        peer: u32,
        message: u64,
        envelope: Envelope,
        eager: bool,
    ) -> Result<(), Violation> {
        let offer = Offered { order: self.next_order(), message, envelope, eager };
        if let Some(posted) = self.take_posted(peer, envelope.tag) {
            return self.grant(peer, offer, posted);
        }
        let pair = self.pairs.entry(peer).or_default();
        if pair.offers.len >= OFFERS_MAX {
            return Err(Violation::Protocol(format!("more than {OFFERS_MAX} offers are pending")));
        }
        if eager {
            pair.held_bytes = pair.held_bytes.saturating_add(envelope.bytes);
            if pair.held_bytes > EAGER_WINDOW_BYTES {
                let most = EAGER_WINDOW_BYTES;
                return Err(Violation::Protocol(format!("over {most} unrequested bytes received")));
            }
        }
        pair.offers.push(envelope.tag, offer);
        Ok(())
    }

    /// Takes the oldest offer of this tag that `peer`, or any peer, has made.
    fn take_offer(&mut self, peer: u32, tag: u64) -> Option<(u32, Offered)> {
        let peer = if peer == ANY_RANK {
            let first = |pair: &Pair| pair.offers.first(tag).map(|offer| offer.order);
            let all = self.pairs.iter().filter_map(|(peer, pair)| Some((first(pair)?, *peer)));
            all.min()?.1
        } else {
            peer
        };
        let pair = self.pairs.get_mut(&peer)?;
        let offer = pair.offers.pop(tag)?;
        if offer.eager {
            pair.held_bytes -= offer.envelope.bytes;
        }
        Some((peer, offer))
    }

    /// Takes the oldest receive that matches an offer of this tag from `peer`.
    fn take_posted(&mut self, peer: u32, tag: u64) -> Option<Posted> {
        let own = &mut self.pairs.entry(peer).or_default().posted;
        let order = |queue: &ByTag<Posted>| queue.first(tag).map_or(u64::MAX, |first| first.order);
        match order(own) <= order(&self.posted_to_any) {
            true => own.pop(tag),
            false => self.posted_to_any.pop(tag),
        }
    }

    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Handles a grant of the peer.
    ///
    /// # Errors
    /// [`Violation`] if the message was not offered.
    pub fn granted(&mut self, peer: u32, message: u64) -> Result<(), Violation> {
        let pair = self.pairs.entry(peer).or_default();
        let Some((ticket, envelope)) = pair.offered.remove(&message) else {
            return Err(Violation::Protocol(format!("message {message} was granted, not offered")));
        };
        let eager = pair.eager.remove(&message);
        if eager {
            pair.eager_bytes -= envelope.bytes;
        }
        self.actions.push_back(if envelope.bytes == 0 || eager {
            PairAction::Complete { ticket }
        } else {
            PairAction::Stream { peer, message, ticket }
        });
        self.offer(peer);
        Ok(())
    }

    /// Handles the start of a piece: returns its transfer and its offset in it.
    ///
    /// # Errors
    /// [`Violation`] if the message was not granted or is too long.
    pub fn piece(
        &mut self,
        peer: u32,
        message: u64,
        bytes: u64,
    ) -> Result<(TransferId, u64), Violation> {
        let arriving = self.pairs.get(&peer).and_then(|pair| pair.arriving.get(&message));
        match arriving {
            Some((ticket, have, all)) if bytes > 0 && have + bytes <= *all => Ok((*ticket, *have)),
            _ => {
                Err(Violation::Protocol(format!("{bytes} unrequested bytes of message {message}")))
            }
        }
    }

    /// Handles the end of a piece.
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
            let Some((ticket, envelope)) = pair.queued.pop_front() else { return };
            let message = pair.next_message;
            pair.next_message += 1;
            pair.offered.insert(message, (ticket, envelope));
            let eager = (1..=EAGER_BYTES_MAX).contains(&envelope.bytes)
                && pair.eager_bytes + envelope.bytes <= EAGER_WINDOW_BYTES;
            if eager {
                pair.eager.insert(message);
                pair.eager_bytes += envelope.bytes;
            }
            let eager = eager.then_some(ticket);
            self.actions.push_back(PairAction::Offer { peer, message, envelope, eager });
        }
    }

    fn grant(&mut self, peer: u32, offered: Offered, posted: Posted) -> Result<(), Violation> {
        let Offered { message, envelope: offer, eager, .. } = offered;
        let Posted { ticket, envelope, .. } = posted;
        // Ranks may give an operation different lengths for each other: then both sides of a pair
        // must agree on the length of their message.
        if !is_match(&offer.fingerprint, &envelope.fingerprint) || offer.bytes != envelope.bytes {
            return Err(Violation::Mismatch {
                sequence: envelope.tag & (u64::MAX >> 1),
                fingerprint: of_length(envelope),
                peer_fingerprint: of_length(offer),
            });
        }
        self.actions.push_back(PairAction::Grant { peer, message, ticket });
        if eager {
            self.actions.push_back(PairAction::Take { peer, message, ticket });
        }
        if envelope.bytes == 0 || eager {
            self.actions.push_back(PairAction::Complete { ticket });
        } else {
            let pair = self.pairs.entry(peer).or_default();
            pair.arriving.insert(message, (ticket, 0, envelope.bytes));
        }
        Ok(())
    }
}

/// True if the operations match: a send with a receive of the same type and count, any other with
/// its equal.
fn is_match(offered: &Fingerprint, own: &Fingerprint) -> bool {
    match (offered.kind, own.kind) {
        (Kind::Send, Kind::Recv) => offered.dtype == own.dtype && offered.count == own.count,
        _ => offered == own,
    }
}

/// The called operation for messages, with the length of this message if the operation has none.
fn of_length(envelope: Envelope) -> Fingerprint {
    let Envelope { bytes, fingerprint, .. } = envelope;
    match fingerprint.kind {
        Kind::Alltoall => Fingerprint {
            count: bytes / u64::from(fingerprint.element_bytes.max(1)),
            ..fingerprint
        },
        _ => fingerprint,
    }
}
