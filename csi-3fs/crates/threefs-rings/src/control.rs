//! Control messages: ioctl commands on the session file of a mount and on open files.
//!
//! A session is one open description of `3fs-virt/session`: the kernel reports its end however the
//! process ends. Memory and rings belong to a session. A file is registered by an ioctl on its
//! open descriptor, so a caller can only use files that it has open; the message carries the
//! session's token.
//!
//! Numbers below 64 of type `h` belong to the public interface of 3FS.

use crate::name::Id;

/// Magic number of 3FS.
pub const MAGIC: u32 = 0x8f3f_5fff;
/// Version of this protocol.
pub const VERSION: u32 = 1;
/// Name of the directory in a mount's root.
pub const VIRTUAL_DIRECTORY: &str = "3fs-virt";
/// Name of the session file in [`VIRTUAL_DIRECTORY`].
pub const SESSION_FILE: &str = "session";
/// Name of the directory of memory links in [`VIRTUAL_DIRECTORY`].
pub const LINKS_DIRECTORY: &str = "iovs";

const WRITE: u32 = 1;
const READ: u32 = 2;

const fn command(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'h' as u32) << 8 | number
}

/// Any file: returns [`MAGIC`].
pub const GET_MAGIC: u32 = command(READ, 2, 4);
/// The session file: returns a [`Session`].
pub const SESSION: u32 = command(READ, 64, Session::BYTES);
/// The session file: registers memory or a ring, in and out a [`Register`].
pub const REGISTER: u32 = command(READ | WRITE, 65, Register::BYTES);
/// The session file: removes memory, a ring or a file, by its [`Number`].
pub const REMOVE: u32 = command(WRITE, 66, Number::BYTES);
/// The session file: announces submissions, by [`Submit`].
pub const SUBMIT: u32 = command(WRITE, 67, Submit::BYTES);
/// An open file: registers it, in and out a [`RegisterFile`].
pub const REGISTER_FILE: u32 = command(READ | WRITE, 68, RegisterFile::BYTES);

/// Flag of a ring: for reads.
pub const FOR_READ: u32 = 1;
/// Flag of a ring: a read of a hole fails with ENODATA instead of returning zeros.
pub const FORBID_HOLES: u32 = 2;
/// Flag of memory and rings: their name belongs to this session. The daemon removes it when the
/// session ends, if it may.
pub const OWNED: u32 = 4;

/// A session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Secret that names the session when files are registered.
    pub token: [u8; 16],
    /// User of the daemon, which needs access to registered memory.
    pub user: u32,
    /// [`VERSION`] of the daemon.
    pub version: u32,
}

impl Session {
    /// Size of the message.
    pub const BYTES: usize = 24;

    /// Bytes of the message.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.token);
        put(&mut bytes, 16, self.user);
        put(&mut bytes, 20, self.version);
        bytes
    }

    /// `None` if the bytes are too few.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let token = *bytes.first_chunk()?;
        Some(Self { token, user: get(bytes, 16)?, version: get(bytes, 20)? })
    }
}

/// Memory for data (`entries` is 0) or a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// Id, which is part of the name in `/dev/shm`.
    pub id: Id,
    /// Size in bytes.
    pub bytes: u64,
    /// Block size of memory for data; no I/O crosses a block. 0 for none.
    pub block: u64,
    /// Entries of a ring.
    pub entries: u32,
    /// [`FOR_READ`], [`FORBID_HOLES`], [`OWNED`].
    pub flags: u32,
    /// Maximum number of submissions of a ring that are executed at once; 0 for no limit.
    pub limit: u32,
    /// Number of the ring's completions so far.
    pub start: u32,
    /// Out: the number by which submissions and later messages refer to it.
    pub number: u32,
}

impl Register {
    /// Size of the message.
    pub const BYTES: usize = 56;

    /// Bytes of the message.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.id);
        bytes[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.block.to_le_bytes());
        let words = [self.entries, self.flags, self.limit, self.start, self.number];
        for (index, word) in words.into_iter().enumerate() {
            put(&mut bytes, 32 + 4 * index, word);
        }
        bytes
    }

    /// `None` if the bytes are too few.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            id: *bytes.first_chunk()?,
            bytes: u64::from_le_bytes(*bytes.get(16..)?.first_chunk()?),
            block: u64::from_le_bytes(*bytes.get(24..)?.first_chunk()?),
            entries: get(bytes, 32)?,
            flags: get(bytes, 36)?,
            limit: get(bytes, 40)?,
            start: get(bytes, 44)?,
            number: get(bytes, 48)?,
        })
    }
}

/// What a [`REMOVE`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// 0: memory or a ring, 1: a file.
    pub kind: u32,
    /// Its number.
    pub number: u32,
}

impl Number {
    /// Size of the message.
    pub const BYTES: usize = 8;
    /// Kind of memory and rings.
    pub const REGION: u32 = 0;
    /// Kind of files.
    pub const FILE: u32 = 1;

    /// Bytes of the message.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        pair(self.kind, self.number)
    }

    /// `None` if the bytes are too few.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self { kind: get(bytes, 0)?, number: get(bytes, 4)? })
    }
}

/// New submissions of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submit {
    /// The ring's number.
    pub ring: u32,
    /// Number of submissions since the ring's creation, modulo 2^32.
    pub tail: u32,
}

impl Submit {
    /// Size of the message.
    pub const BYTES: usize = 8;

    /// Bytes of the message.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        pair(self.ring, self.tail)
    }

    /// `None` if the bytes are too few.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self { ring: get(bytes, 0)?, tail: get(bytes, 4)? })
    }
}

/// A file, registered for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterFile {
    /// The session's token.
    pub token: [u8; 16],
    /// Out: the file's number.
    pub number: u32,
}

impl RegisterFile {
    /// Size of the message.
    pub const BYTES: usize = 20;

    /// Bytes of the message.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.token);
        put(&mut bytes, 16, self.number);
        bytes
    }

    /// `None` if the bytes are too few.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self { token: *bytes.first_chunk()?, number: get(bytes, 16)? })
    }
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    put(&mut bytes, 0, first);
    put(&mut bytes, 4, second);
    bytes
}

fn put(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
}

fn get(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
