//! Words between members, each behind its length, over a non-blocking socket.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::core::regroup::Word;

/// The longest word: the cards of ten thousand members.
const WORD_BYTES_MAX: usize = 16 << 20;
/// What is read at once.
const READ_BYTES: usize = 64 << 10;

/// One connection.
pub struct Line {
    stream: TcpStream,
    came: Vec<u8>,
    going: Vec<u8>,
    ended: Option<String>,
}

impl Line {
    /// Over a connected socket.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, came: Vec::new(), going: Vec::new(), ended: None })
    }

    /// Queues a word.
    pub fn say(&mut self, word: &Word) {
        let bytes = serde_json::to_vec(word).unwrap_or_default();
        self.going.extend((bytes.len() as u32).to_le_bytes());
        self.going.extend(bytes);
        self.flush();
    }

    /// Sends what the socket takes; true if nothing is left or nobody listens.
    pub fn flush(&mut self) -> bool {
        while !self.going.is_empty() && self.ended.is_none() {
            match self.stream.write(&self.going) {
                Ok(bytes) => drop(self.going.drain(..bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What it said before is still read.
                Err(_) => self.going.clear(),
            }
        }
        true
    }

    /// The next word that is complete.
    pub fn next_word(&mut self) -> Option<Word> {
        self.receive();
        let (length, rest) = self.came.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > WORD_BYTES_MAX {
            self.garbage(format!("a word of {length} bytes, over {WORD_BYTES_MAX}"));
            return None;
        }
        let word = serde_json::from_slice(rest.get(..length)?);
        self.came.drain(..4 + length);
        match word {
            Ok(word) => Some(word),
            Err(error) => {
                self.garbage(format!("a word that cannot be read: {error}"));
                None
            }
        }
    }

    /// How it ended, once all that came was read.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    fn garbage(&mut self, why: String) {
        self.came.clear();
        self.ended = Some(why);
    }

    fn receive(&mut self) {
        let mut some = [0; READ_BYTES];
        while self.ended.is_none() && self.came.len() < 4 + WORD_BYTES_MAX {
            match self.stream.read(&mut some) {
                Ok(0) => self.ended = Some("its connection was closed".into()),
                Ok(bytes) => self.came.extend(&some[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.ended = Some(format!("its connection broke: {error}")),
            }
        }
    }
}
