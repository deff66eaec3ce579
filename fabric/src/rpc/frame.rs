//! Frames: a fixed-size header, a message and a payload; one reader, and one writer that batches
//! queued frames into few system calls.
//!
//! ```text
//!  0 magic "FFR1"      4 version   5 kind   6 class  7 zero  8 request id (8)
//! 16 message bytes (4)  20 payload bytes (4)  24 time in ms (4)  28 crc32c of the message (4)
//! 32 crc32c of bytes 0..32
//! ```
//! All numbers are little endian. The payload has no checksum: a sender of file data also sends the
//! checksum of the data, which outlives the connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::message::{Limits, Payload};

const MAGIC: [u8; 4] = *b"FFR1";
/// An older caller uses neither classes (it sends zero, the first class) nor offers: its requests
/// are served as memory allows.
const VERSION: u8 = 1;

/// Length of every frame's header.
pub const HEADER_BYTES: usize = 36;

/// Type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A call. Time: how long the caller waits.
    Request = 1,
    /// A reply. Time: the server's clock of this connection (`not_after`), 0 if it has none.
    Reply = 2,
    /// An encoded `Fault` instead of a reply. Time: as for a reply.
    Fault = 3,
    /// A guarded call: must be started before the server's clock of this connection reaches its
    /// time.
    NotAfter = 4,
    /// Request-to-send: announces the lengths of a request that is too large to be sent without a
    /// grant. Header only. Time: as for a request.
    Offer = 5,
    /// Clear-to-send: the server has reserved memory for an offered request. Header only.
    Grant = 6,
    /// The caller timed out before it used its grant. Header only.
    Decline = 7,
}

impl Kind {
    /// True if message and payload follow the header; otherwise the lengths only announce them.
    pub(super) fn has_body(self) -> bool {
        !matches!(self, Self::Offer | Self::Grant | Self::Decline)
    }
}

/// Fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    /// The server's budget that the call counts against (`budget`).
    pub class: u8,
    pub request_id: u64,
    pub message_bytes: usize,
    pub payload_bytes: usize,
    /// The meaning depends on the kind.
    pub time_ms: u32,
    pub message_crc: u32,
}

/// Reason why a header is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("not a frame: the first bytes are {first:02x?}")]
    Garbage { first: [u8; 4] },
    #[error("frame version {version}, this side speaks {VERSION}")]
    Version { version: u8 },
    #[error("unknown frame kind {kind}")]
    Kind { kind: u8 },
    #[error("the header's checksum is {received:08x}, not {computed:08x}")]
    HeaderChecksum { received: u32, computed: u32 },
    #[error("the message's checksum is {received:08x}, not {computed:08x}")]
    MessageChecksum { received: u32, computed: u32 },
    #[error("{part} of {bytes} bytes exceeds the limit of {bytes_max}")]
    TooLarge { part: &'static str, bytes: usize, bytes_max: usize },
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[6] = self.class;
        bytes[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        // Both lengths were checked against `Limits`, which are far below 4 GiB.
        bytes[16..20].copy_from_slice(&(self.message_bytes as u32).to_le_bytes());
        bytes[20..24].copy_from_slice(&(self.payload_bytes as u32).to_le_bytes());
        bytes[24..28].copy_from_slice(&self.time_ms.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.message_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..32]);
        bytes[32..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, FrameError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[..4] != MAGIC {
            return Err(FrameError::Garbage { first: [bytes[0], bytes[1], bytes[2], bytes[3]] });
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version { version: bytes[4] });
        }
        let (received, computed) = (word(32), crc32c::crc32c(&bytes[..32]));
        if received != computed {
            return Err(FrameError::HeaderChecksum { received, computed });
        }
        let kind = match bytes[5] {
            1 => Kind::Request,
            2 => Kind::Reply,
            3 => Kind::Fault,
            4 => Kind::NotAfter,
            5 => Kind::Offer,
            6 => Kind::Grant,
            7 => Kind::Decline,
            kind => return Err(FrameError::Kind { kind }),
        };
        let header = Self {
            kind,
            class: bytes[6],
            request_id: u64::from(word(8)) | u64::from(word(12)) << 32,
            message_bytes: word(16) as usize,
            payload_bytes: word(20) as usize,
            time_ms: word(24),
            message_crc: word(28),
        };
        header.within(limits)?;
        Ok(header)
    }

    pub(super) fn within(&self, limits: &Limits) -> Result<(), FrameError> {
        for (part, bytes, bytes_max) in [
            ("message", self.message_bytes, limits.message_bytes_max),
            ("payload", self.payload_bytes, limits.payload_bytes_max),
        ] {
            if bytes > bytes_max {
                return Err(FrameError::TooLarge { part, bytes, bytes_max });
            }
        }
        Ok(())
    }

    pub(super) fn check_message(&self, message: &[u8]) -> Result<(), FrameError> {
        let computed = crc32c::crc32c(message);
        if self.message_crc == computed {
            return Ok(());
        }
        Err(FrameError::MessageChecksum { received: self.message_crc, computed })
    }
}

/// Messages up to this length are copied after their header, which saves an I/O vector.
const INLINE_BYTES_MAX: usize = 4 << 10;
/// Maximum number of frames in one system call.
const FRAMES_PER_WRITE: usize = 64;
/// The kernel accepts at most 1024 vectors per call; few are sufficient.
const VECTORS_PER_WRITE: usize = 64;

/// Reason why no frame could be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("a frame was not complete {0:?} after its first byte")]
    Stalled(Duration),
    #[error("a frame of kind {0:?} belongs to the other side")]
    Direction(Kind),
    #[error("its credential has expired")]
    Expired,
    #[error("key {0}, with which it authenticated, was removed from the key file")]
    KeyRemoved(u32),
}

/// Reads a header. The wait for its first byte is unbounded (an idle connection), the rest is
/// bounded.
pub(super) async fn read_header(
    reader: &mut (impl AsyncRead + Unpin),
    limits: &Limits,
    stall_timeout: Duration,
) -> Result<Header, ReadError> {
    let mut bytes = [0; HEADER_BYTES];
    let received = reader.read(&mut bytes).await?;
    if received == 0 {
        return Err(ReadError::Closed);
    }
    if received < HEADER_BYTES {
        within(stall_timeout, async { Ok(reader.read_exact(&mut bytes[received..]).await?) })
            .await?;
    }
    Ok(Header::decode(&bytes, limits)?)
}

/// Reads the body that a header announced. The lengths have been checked. Fails if no byte arrives
/// for `stall_timeout`, or if less than one buffer arrives per `stall_timeout`.
pub(super) async fn read_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
    stall_timeout: Duration,
) -> Result<(Bytes, Bytes), ReadError> {
    let message = read_bytes(reader, header.message_bytes, stall_timeout).await?;
    header.check_message(&message)?;
    Ok((message, read_bytes(reader, header.payload_bytes, stall_timeout).await?))
}

/// Reads and discards the body that a header announced, in bounded memory.
pub(super) async fn skip_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
    stall_timeout: Duration,
) -> Result<(), ReadError> {
    within(stall_timeout, async {
        let length = (header.message_bytes + header.payload_bytes) as u64;
        match tokio::io::copy(&mut reader.take(length), &mut tokio::io::sink()).await? {
            skipped if skipped == length => Ok(()),
            _ => Err(ReadError::Closed),
        }
    })
    .await
}

async fn within<T>(
    timeout: Duration,
    read: impl Future<Output = Result<T, ReadError>>,
) -> Result<T, ReadError> {
    tokio::time::timeout(timeout, read).await.unwrap_or(Err(ReadError::Stalled(timeout)))
}

/// A chunk of this size must arrive within the timeout: bounds a peer that sends byte by byte.
const STEP_BYTES: usize = 256 << 10;

async fn read_bytes(
    reader: &mut (impl AsyncRead + Unpin),
    length: usize,
    stall_timeout: Duration,
) -> Result<Bytes, ReadError> {
    if length == 0 {
        return Ok(Bytes::new());
    }
    let (mut buffer, start) = empty_buffer(length);
    let mut limited = reader.take(length as u64);
    let end = start + length;
    while buffer.len() < end {
        let step = end.min(buffer.len() + STEP_BYTES);
        within(stall_timeout, async {
            while buffer.len() < step {
                if limited.read_buf(&mut buffer).await? == 0 {
                    return Err(ReadError::Closed);
                }
            }
            Ok(())
        })
        .await?;
    }
    Ok(buffer.freeze().slice(start..))
}

/// Payloads of this size start at a multiple of [`ALIGNMENT_BYTES`], so that a storage service can
/// write them with O_DIRECT.
const ALIGNED_BYTES_MIN: usize = 64 << 10;
const ALIGNMENT_BYTES: usize = 4 << 10;

/// Memory for `length` bytes from the returned offset.
fn empty_buffer(length: usize) -> (BytesMut, usize) {
    // Not zeroed: `read_buf` fills spare capacity.
    if length < ALIGNED_BYTES_MIN {
        return (BytesMut::with_capacity(length), 0);
    }
    let mut buffer = BytesMut::with_capacity(length + ALIGNMENT_BYTES);
    let start = buffer.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
    buffer.put_bytes(0, start);
    (buffer, start)
}

/// An outgoing frame. `hold` is dropped when the frame has been written, not before.
pub(super) struct Outgoing<H> {
    pub kind: Kind,
    pub class: u8,
    pub request_id: u64,
    pub time_ms: u32,
    pub message: Bytes,
    pub payload: Payload,
    /// Lengths that a frame without a body announces.
    pub announces: (usize, usize),
    pub hold: H,
}

impl<H> Outgoing<H> {
    /// A frame without a body.
    pub(super) fn bare(kind: Kind, request_id: u64, hold: H) -> Self {
        let (message, payload) = (Bytes::new(), Payload::empty());
        let (class, time_ms, announces) = (0, 0, (0, 0));
        Self { kind, class, request_id, time_ms, message, payload, announces, hold }
    }

    pub(super) fn header(&self) -> Header {
        let (message_bytes, payload_bytes) = match self.kind.has_body() {
            true => (self.message.len(), self.payload.len()),
            false => self.announces,
        };
        Header {
            kind: self.kind,
            class: self.class,
            request_id: self.request_id,
            message_bytes,
            payload_bytes,
            time_ms: self.time_ms,
            message_crc: crc32c::crc32c(&self.message),
        }
    }
}

/// Interval at which the writer calls `stalled` while the peer accepts no bytes.
const STALL_CHECK: Duration = Duration::from_millis(250);

/// Writes frames until all senders of the queue are dropped.
///
/// # Errors
/// Returns the socket's error, or `TimedOut` if the peer accepts no byte for a time that `stalled`
/// does not tolerate.
pub(super) async fn write_frames<H>(
    writer: &mut (impl AsyncWrite + Unpin),
    queue: &mut mpsc::Receiver<Outgoing<H>>,
    stalled: impl Fn(Duration) -> bool,
) -> io::Result<()> {
    let mut frames = Vec::with_capacity(FRAMES_PER_WRITE);
    let mut parts = VecDeque::new();
    while queue.recv_many(&mut frames, FRAMES_PER_WRITE).await > 0 {
        let mut inline = BytesMut::new();
        let mut large_parts = Vec::with_capacity(frames.len());
        for frame in frames.drain(..) {
            inline.extend_from_slice(&frame.header().encode());
            if frame.message.len() <= INLINE_BYTES_MAX {
                inline.extend_from_slice(&frame.message);
            } else {
                parts.push_back(inline.split().freeze());
                parts.push_back(frame.message);
            }
            if !frame.payload.is_empty() {
                if !inline.is_empty() {
                    parts.push_back(inline.split().freeze());
                }
                parts.extend(frame.payload.into_parts());
            }
            large_parts.push(frame.hold);
        }
        if !inline.is_empty() {
            parts.push_back(inline.freeze());
        }
        write_parts(writer, &mut parts, &stalled).await?;
        flush(writer, &stalled).await?;
    }
    Ok(())
}

/// Flushes data that a TLS session has encrypted and buffered; a no-op without TLS.
async fn flush(
    writer: &mut (impl AsyncWrite + Unpin),
    stalled: &impl Fn(Duration) -> bool,
) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match tokio::time::timeout(STALL_CHECK, writer.flush()).await {
            Ok(flushed) => return flushed,
            Err(_) if stalled(started.elapsed()) => return Err(io::ErrorKind::TimedOut.into()),
            Err(_) => {}
        }
    }
}

async fn write_parts(
    writer: &mut (impl AsyncWrite + Unpin),
    parts: &mut VecDeque<Bytes>,
    stalled: &impl Fn(Duration) -> bool,
) -> io::Result<()> {
    loop {
        while parts.front().is_some_and(|part| part.is_empty()) {
            parts.pop_front();
        }
        if parts.is_empty() {
            return Ok(());
        }
        let vectors: Vec<IoSlice<'_>> =
            parts.iter().take(VECTORS_PER_WRITE).map(|part| IoSlice::new(part)).collect();
        let started = Instant::now();
        let mut written = loop {
            let write = tokio::time::timeout(STALL_CHECK, writer.write_vectored(&vectors));
            match write.await {
                Ok(written) => break written?,
                Err(_) if stalled(started.elapsed()) => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => {}
            }
        };
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        while written > 0 {
            let Some(part) = parts.front_mut() else { break };
            let part_bytes = written.min(part.len());
            part.advance(part_bytes);
            written -= part_bytes;
            if part.is_empty() {
                parts.pop_front();
            }
        }
    }
}
