//! Frames between nodes, and how the receiver handles them.

use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::tree::Violation;
use hfreduce_transport::wire::{Frame, HEAD_BYTES, Head};

use super::{Event, Group, LINK_LATENCY, Message, SLOT_BYTES};

impl Group<'_> {
    /// Bytes on a connection arrive in order, after everything sent before.
    pub(super) fn post(
        &mut self,
        node: usize,
        link: usize,
        message: Message,
        payload_bytes: usize,
    ) {
        let (to, back) = self.nodes[node].ends[link];
        let bytes = (HEAD_BYTES + payload_bytes) as f64;
        let at = self.nodes[node].pipes[link].carry(self.event_queue.now(), bytes) + LINK_LATENCY;
        self.event_queue.plan(at, Event::Arrived { node: to, link: back, message });
    }

    pub(super) fn arrived(&mut self, node: usize, link: usize, message: Message) {
        let owner = self.owner(node);
        if self.ranks[owner].ending.failed.is_some() {
            return;
        }
        self.nodes[node].received[link] = true;
        let peer = self.owner(self.nodes[node].ends[link].0);
        match message {
            Message::Frame(head) => self.frame(node, link, head),
            Message::Raw(bytes) => match Head::decode(&bytes, SLOT_BYTES) {
                Ok(head) => self.frame(node, link, head),
                Err(why) => {
                    self.fail(owner, self.blame(ErrorKind::Protocol, owner, peer, &why), None)
                }
            },
            Message::Abort(bytes) => {
                self.fail(owner, AbortReason::decode(&bytes, owner as u32), Some(link));
            }
            Message::End => {
                self.see_abort(owner);
                let why = "its connection was closed unexpectedly";
                self.fail(owner, self.blame(ErrorKind::PeerDied, owner, peer, why), None);
            }
        }
    }

    fn frame(&mut self, node: usize, link: usize, head: Head) {
        let core = &mut self.nodes[node].core;
        let mut result = core.credits(link, head.credits);
        if result.is_ok() {
            result = match head.frame {
                Frame::Data(data) => {
                    core.place(link, &data).and_then(|place| core.arrived(link, &data, place))
                }
                Frame::Credit => Ok(()),
                Frame::Heartbeat { sequence, fingerprint, waiting_for } => {
                    self.nodes[node].reported[link] = Some((sequence, waiting_for));
                    self.nodes[node].core.compare(sequence, fingerprint)
                }
                _ => Err(Violation::Protocol("a frame that is not valid on tree links".into())),
            };
        }
        match result {
            Ok(()) => self.drain(node),
            Err(why) => self.violated(node, link, why),
        }
    }
}
