//! Log: frames of records, appended and flushed, never overwritten.
//!
//! A frame is one flush: {magic, length, checksum, number} and its records, padded to 4 KiB. Frame
//! n + 1 is written only after frame n was flushed, so after a crash at most the last frame is
//! torn, or lacks data that was flushed together with it (`unverified.rs`). A damaged frame that is
//! *followed* by a complete one means corruption: the store then refuses to open, because opening
//! would lose acknowledged updates.

use std::io;

use serde::{Deserialize, Serialize, Serializer};
use threefs_core::chunk::{BLOCK_BYTES, ChunkState};
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, StoreId};

use crate::blocks::Extent;
use crate::disk::DiskFile;

/// "3FSL": file format 1 of the log.
const MAGIC: u32 = 0x3346_534c;
const HEADER_BYTES: usize = 24;
/// Before each record.
const LENGTH_BYTES: usize = 4;
/// Maximum size of a frame: a larger length is corruption.
pub(crate) const FRAME_BYTES_MAX: usize = 64 << 20;

/// Location of the data of one state, and its block checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Content {
    pub(crate) extents: Vec<Extent>,
    pub(crate) checksums: Vec<u32>,
}

impl Content {
    /// Position in the content and number of each stored block.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (usize, u64)> {
        let mut at = 0;
        self.extents.iter().flat_map(move |extent| {
            let first = at;
            at += extent.blocks as usize;
            let stored = if extent.is_hole() { 0 } else { u64::from(extent.blocks) };
            (0..stored).map(move |block| (first + block as usize, extent.start + block))
        })
    }
}

/// One change of the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// A new pending state, replacing an existing one.
    Pending { chunk: ChunkId, state: ChunkState, content: Content },
    /// The pending state becomes the committed one.
    Commit { chunk: ChunkId, version: ChunkVersion, chain_version: ChainVersion },
    /// The chunk is removed from the index.
    Forget { chunk: ChunkId },
    /// A committed state, in a compacted log.
    Committed { chunk: ChunkId, state: ChunkState, content: Content },
    /// The chunks of these inodes are removed from the index, and updates of them are rejected.
    Gone { inodes: Vec<InodeRange> },
    /// Identity of the store.
    Store { id: StoreId },
    /// As `Pending`, with the data of the new blocks, which may not be flushed to the data file.
    Written {
        chunk: ChunkId,
        state: ChunkState,
        content: Content,
        runs: Vec<Extent>,
        #[serde(serialize_with = "as_bytes")]
        data: Vec<u8>,
    },
    /// Versions of new chunks start above this.
    Floor { version: ChunkVersion },
    /// As `Pending`. The data of the new blocks, `runs`, is flushed together with this record.
    Verified { chunk: ChunkId, state: ChunkState, content: Content, runs: Vec<Extent> },
}

impl Record {
    /// The chunk of the record.
    pub(crate) fn chunk(&self) -> Option<ChunkId> {
        match self {
            Self::Pending { chunk, .. }
            | Self::Written { chunk, .. }
            | Self::Verified { chunk, .. }
            | Self::Commit { chunk, .. }
            | Self::Forget { chunk }
            | Self::Committed { chunk, .. } => Some(*chunk),
            Self::Gone { .. } | Self::Store { .. } | Self::Floor { .. } => None,
        }
    }

    /// Bytes of its encoding, with some to spare: a hint for the allocation.
    fn usual_bytes(&self) -> usize {
        const FIXED_BYTES: usize = 128;
        const EXTENT_BYTES: usize = 8;
        const CHECKSUM_BYTES: usize = 5;
        let of = |content: &Content, runs: usize, data: usize| {
            let extents = (content.extents.len() + runs) * EXTENT_BYTES;
            FIXED_BYTES + extents + content.checksums.len() * CHECKSUM_BYTES + data
        };
        match self {
            Self::Pending { content, .. } | Self::Committed { content, .. } => of(content, 0, 0),
            Self::Written { content, runs, data, .. } => of(content, runs.len(), data.len()),
            Self::Verified { content, runs, .. } => of(content, runs.len(), 0),
            Self::Gone { .. }
            | Self::Commit { .. }
            | Self::Forget { .. }
            | Self::Store { .. }
            | Self::Floor { .. } => FIXED_BYTES,
        }
    }
}

/// The format of a sequence of bytes, written as a whole.
fn as_bytes<S: Serializer>(data: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(data)
}

/// Appends a record to the body of the next frame; after an error the body is unspecified.
pub(crate) fn encode(record: &Record, body: &mut Vec<u8>) -> io::Result<()> {
    body.reserve(LENGTH_BYTES + record.usual_bytes());
    let start = body.len();
    body.extend_from_slice(&[0; LENGTH_BYTES]);
    let encoded = postcard::to_extend(record, std::mem::take(body)).map_err(io::Error::other)?;
    *body = encoded;
    let length = u32::try_from(body.len() - start - LENGTH_BYTES).map_err(io::Error::other)?;
    body[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    Ok(())
}

/// The records of a body, each with its length.
pub(crate) fn split(mut body: &[u8]) -> impl Iterator<Item = io::Result<&[u8]>> {
    std::iter::from_fn(move || {
        let length = body.first_chunk::<LENGTH_BYTES>()?;
        let end = LENGTH_BYTES + u32::from_le_bytes(*length) as usize;
        let Some((record, rest)) = body.split_at_checked(end) else {
            body = &[];
            return Some(Err(io::Error::new(io::ErrorKind::InvalidData, "truncated record")));
        };
        body = rest;
        Some(Ok(record))
    })
}

/// A frame with this body, ready to be written.
pub(crate) fn frame(number: u64, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(padded(body.len()));
    frame.extend_from_slice(&MAGIC.to_le_bytes());
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&number.to_le_bytes());
    let sum = crc32c::crc32c_append(crc32c::crc32c(&frame), body);
    frame.extend_from_slice(&sum.to_le_bytes());
    frame.resize(HEADER_BYTES, 0);
    frame.extend_from_slice(body);
    frame.resize(padded(body.len()), 0);
    frame
}

/// Bytes of a frame with `body` bytes of records.
pub(crate) fn padded(body: usize) -> usize {
    (HEADER_BYTES + body).next_multiple_of(BLOCK_BYTES)
}

/// Result of a replay.
#[derive(Debug)]
pub(crate) struct Replay {
    /// Position of the next frame.
    pub(crate) end: u64,
    /// Number of the next frame.
    pub(crate) next_number: u64,
    /// There is a frame at `end`, whose data is missing.
    pub(crate) void: bool,
}

/// Reads all complete frames and passes their records in order. The last frame is void unless
/// `has_data`.
pub(crate) fn replay(
    file: &impl DiskFile,
    has_data: impl Fn(&[Record]) -> bool,
    mut take: impl FnMut(Record),
) -> io::Result<Replay> {
    let length = file.length()?;
    let mut replay = Replay { end: 0, next_number: 1, void: false };
    let mut next = read_frame(file, 0, length, replay.next_number)?;
    while let Some(body) = next {
        let end = replay.end + padded(body.len()) as u64;
        next = read_frame(file, end, length, replay.next_number + 1)?;
        let records = decode(&body)?;
        if next.is_none() && !has_data(&records) {
            replay.void = true;
            break;
        }
        records.into_iter().for_each(&mut take);
        replay.end = end;
        replay.next_number += 1;
    }
    let mut at = replay.end + BLOCK_BYTES as u64;
    while at < length {
        if let Some(number) = frame_number(file, at, length)?
            && number >= replay.next_number
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the log is damaged at byte {}: frame {} is missing, but frame {number} exists",
                    replay.end, replay.next_number
                ),
            ));
        }
        at += BLOCK_BYTES as u64;
    }
    Ok(replay)
}

fn read_frame(
    file: &impl DiskFile,
    at: u64,
    length: u64,
    number: u64,
) -> io::Result<Option<Vec<u8>>> {
    if at + HEADER_BYTES as u64 > length {
        return Ok(None);
    }
    let mut header = [0; HEADER_BYTES];
    file.read_at(&mut header, at)?;
    let field = |from: usize| {
        u32::from_le_bytes([header[from], header[from + 1], header[from + 2], header[from + 3]])
    };
    let body_bytes = field(4) as usize;
    let frame_number = u64::from(field(8)) | u64::from(field(12)) << 32;
    if field(0) != MAGIC || frame_number != number || body_bytes > FRAME_BYTES_MAX {
        return Ok(None);
    }
    let mut body = vec![0; body_bytes];
    file.read_at(&mut body, at + HEADER_BYTES as u64)?;
    let sum = crc32c::crc32c_append(crc32c::crc32c(&header[..16]), &body);
    Ok((sum == field(16)).then_some(body))
}

/// The number of the complete frame at `at`, if there is one.
fn frame_number(file: &impl DiskFile, at: u64, length: u64) -> io::Result<Option<u64>> {
    let mut header = [0; 16];
    file.read_at(&mut header, at)?;
    if header[0..4] != MAGIC.to_le_bytes() {
        return Ok(None);
    }
    let mut number = [0; 8];
    number.copy_from_slice(&header[8..16]);
    let number = u64::from_le_bytes(number);
    Ok(read_frame(file, at, length, number)?.map(|_| number))
}

fn decode(mut body: &[u8]) -> io::Result<Vec<Record>> {
    let invalid_record = || io::Error::new(io::ErrorKind::InvalidData, "invalid log record");
    let mut records = Vec::new();
    while !body.is_empty() {
        let (length, rest) = body.split_first_chunk::<4>().ok_or_else(invalid_record)?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > rest.len() {
            return Err(invalid_record());
        }
        let (record, rest) = rest.split_at(length);
        records.push(postcard::from_bytes(record).map_err(|_| invalid_record())?);
        body = rest;
    }
    Ok(records)
}
