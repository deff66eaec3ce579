//! Length-prefixed JSON messages over a non-blocking socket.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of a message: the infos of ten thousand members.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Bytes read at a time.
const READ_BYTES: usize = 16 << 10;

/// A connection that carries messages.
pub struct MessageSocket<S = TcpStream> {
    stream: S,
    bytes_max: usize,
    received: ByteQueue,
    outgoing: ByteQueue,
    end_reason: Option<String>,
}

/// A queue of bytes. Its consumed front is released once it is longer than the rest, so that many
/// short messages cost one copy each.
#[derive(Default)]
struct ByteQueue {
    all: Vec<u8>,
    consumed: usize,
}

impl ByteQueue {
    fn rest(&self) -> &[u8] {
        &self.all[self.consumed..]
    }

    fn take(&mut self, bytes: usize) {
        self.consumed += bytes;
        if self.consumed * 2 >= self.all.len() {
            self.all.drain(..self.consumed);
            self.consumed = 0;
        }
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Encodes a message with its length.
pub fn framed(message: &impl Serialize) -> Vec<u8> {
    let message = serde_json::to_vec(message).unwrap_or_default();
    let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
    bytes.extend(message);
    bytes
}

impl MessageSocket {
    /// Over a connected socket.
    ///
    /// # Errors
    /// A system call failed.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::with_limit(stream, MESSAGE_BYTES_MAX))
    }
}

impl<S: Read + Write> MessageSocket<S> {
    /// Over a non-blocking socket; a message has at most `bytes_max` bytes.
    pub fn with_limit(stream: S, bytes_max: usize) -> Self {
        Self {
            stream,
            bytes_max,
            received: ByteQueue::default(),
            outgoing: ByteQueue::default(),
            end_reason: None,
        }
    }

    /// Changes the maximum size of a message.
    pub fn set_message_bytes_max(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// The socket.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// Queues a message.
    pub fn send(&mut self, message: &impl Serialize) {
        self.outgoing.all.extend(framed(message));
        self.flush();
    }

    /// Bytes that are not sent yet.
    pub fn unsent(&self) -> usize {
        self.outgoing.rest().len()
    }

    /// Sends as much as possible; true if nothing is queued or the peer has disconnected.
    pub fn flush(&mut self) -> bool {
        while !self.outgoing.rest().is_empty() && self.end_reason.is_none() {
            match self.stream.write(self.outgoing.rest()) {
                Ok(bytes) => self.outgoing.take(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Messages that the peer sent before are still read.
                Err(_) => self.outgoing.clear(),
            }
        }
        true
    }

    /// Returns the next complete message.
    pub fn next_message<W: DeserializeOwned>(&mut self) -> Option<W> {
        self.receive();
        let (length, rest) = self.received.rest().split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.bytes_max {
            self.end(format!("a message of {length} bytes, over {}", self.bytes_max));
            return None;
        }
        let message = serde_json::from_slice(rest.get(..length)?);
        self.received.take(4 + length);
        match message {
            Ok(message) => Some(message),
            Err(error) => {
                self.end(format!("invalid message: {error}"));
                None
            }
        }
    }

    /// Makes `message`, which was received, the next one again.
    pub fn put_back(&mut self, message: &impl Serialize) {
        self.received.all.splice(..self.received.consumed, framed(message));
        self.received.consumed = 0;
    }

    /// Receives bytes; true if any have arrived or the connection has ended.
    pub fn has_more(&mut self) -> bool {
        let before = self.received.rest().len();
        self.receive();
        self.received.rest().len() > before || self.end_reason.is_some()
    }

    /// Why the connection ended, once all messages were read.
    pub fn end_reason(&self) -> Option<&str> {
        self.end_reason.as_deref()
    }

    /// Discards received bytes and accepts no more.
    pub fn end(&mut self, why: String) {
        self.received.clear();
        self.end_reason = Some(why);
    }

    fn receive(&mut self) {
        let mut some = [0; READ_BYTES];
        while self.end_reason.is_none() && self.received.rest().len() < 4 + self.bytes_max {
            match self.stream.read(&mut some) {
                Ok(0) => self.end_reason = Some("its connection was closed".into()),
                Ok(bytes) => self.received.all.extend(&some[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.end_reason = Some(format!("its connection failed: {error}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_message_that_is_put_back_is_received_before_those_after_it() {
        let (sender, receiver) = UnixStream::pair().unwrap();
        receiver.set_nonblocking(true).unwrap();
        let mut sender = MessageSocket::with_limit(sender, 100);
        let mut receiver = MessageSocket::with_limit(receiver, 100);
        for number in 0..4 {
            sender.send(&number);
        }
        assert_eq!(receiver.next_message(), Some(0));
        assert_eq!(receiver.next_message(), Some(1));
        receiver.put_back(&1);
        for number in 1..4 {
            assert_eq!(receiver.next_message(), Some(number));
        }
        receiver.put_back(&3);
        assert_eq!(receiver.next_message(), Some(3));
        assert_eq!(receiver.next_message::<u32>(), None);
    }
}
