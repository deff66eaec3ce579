//! Format of a dump, for every store. Rows are streamed: neither side needs memory for more than
//! one.
//!
//! ```text
//! magic "3FSDUMP1", kind (length u8, bytes)
//! row*      key length u32 (not 0), value length u32, key, value
//! end       key length 0, count of rows u64, CRC-32C of everything before the CRC u32
//! ```
//!
//! Numbers are little endian, rows are in the order of their keys.

use std::io::{Error, Read, Write};

use super::Dumped;
use crate::embedded::RESERVED_KEYS_END;
use crate::{KEY_BYTES_MAX, Row, VALUE_BYTES_MAX};

const MAGIC: &[u8; 8] = b"3FSDUMP1";
/// Stored keys may be longer than those of callers, by a versionstamp.
const STORED_KEY_BYTES_MAX: usize = KEY_BYTES_MAX + 11;

/// Writes a dump.
pub(super) struct Writer<W> {
    out: Checksummed<W>,
    dumped: Dumped,
}

impl<W: Write> Writer<W> {
    pub(super) fn start(out: W, kind: &str) -> Result<Self, Error> {
        let mut out = Checksummed::new(out);
        out.write_all(MAGIC)?;
        // Kinds are short constants.
        out.write_all(&[kind.len() as u8])?;
        out.write_all(kind.as_bytes())?;
        Ok(Self { out, dumped: Dumped::default() })
    }

    pub(super) fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        // Both are far below 4 GiB: the store refuses longer ones.
        self.out.write_all(&(key.len() as u32).to_le_bytes())?;
        self.out.write_all(&(value.len() as u32).to_le_bytes())?;
        self.out.write_all(key)?;
        self.out.write_all(value)?;
        self.dumped.rows += 1;
        self.dumped.bytes += (key.len() + value.len()) as u64;
        Ok(())
    }

    /// Number of rows so far.
    pub(super) fn rows(&self) -> u64 {
        self.dumped.rows
    }

    pub(super) fn finish(mut self) -> Result<(W, Dumped), Error> {
        self.out.write_all(&0u32.to_le_bytes())?;
        self.out.write_all(&self.dumped.rows.to_le_bytes())?;
        let crc = self.out.crc;
        self.out.write_all(&crc.to_le_bytes())?;
        Ok((self.out.inner, self.dumped))
    }
}

/// Reads a dump. An error is a description of the damage.
pub(super) struct Reader<R> {
    input: Checksummed<R>,
    last: Vec<u8>,
    dumped: Dumped,
}

impl<R: Read> Reader<R> {
    pub(super) fn start(input: R, kind: &str) -> Result<Self, &'static str> {
        let mut input = Checksummed::new(input);
        let mut head = vec![0; MAGIC.len() + 1 + kind.len()];
        input.read_exact(&mut head).map_err(cut)?;
        if head != [MAGIC, &[kind.len() as u8][..], kind.as_bytes()].concat() {
            return Err("the header is wrong");
        }
        Ok(Self { input, last: Vec::new(), dumped: Dumped::default() })
    }

    /// The next row; `None` after the last one, once the whole dump is verified.
    pub(super) fn next(&mut self) -> Result<Option<Row>, &'static str> {
        let key_bytes = self.input.u32().map_err(cut)? as usize;
        if key_bytes == 0 {
            return self.end().map(|()| None);
        }
        let value_bytes = self.input.u32().map_err(cut)? as usize;
        // Checked before memory is allocated.
        if key_bytes > STORED_KEY_BYTES_MAX || value_bytes > VALUE_BYTES_MAX {
            return Err("a row exceeds the maximum size");
        }
        let (mut key, mut value) = (vec![0; key_bytes], vec![0; value_bytes]);
        self.input.read_exact(&mut key).map_err(cut)?;
        self.input.read_exact(&mut value).map_err(cut)?;
        if key <= self.last || key.as_slice() < RESERVED_KEYS_END {
            return Err("the rows are not in order");
        }
        self.dumped.rows += 1;
        self.dumped.bytes += (key_bytes + value_bytes) as u64;
        self.last.clone_from(&key);
        Ok(Some((key, value)))
    }

    fn end(&mut self) -> Result<(), &'static str> {
        let mut count = [0; 8];
        self.input.read_exact(&mut count).map_err(cut)?;
        let crc = self.input.crc;
        if self.input.u32().map_err(cut)? != crc || u64::from_le_bytes(count) != self.dumped.rows {
            return Err("the checksum is wrong");
        }
        match self.input.read(&mut [0]) {
            Ok(0) => Ok(()),
            _ => Err("unexpected data after the end"),
        }
    }

    /// Size of the rows so far.
    pub(super) fn dumped(&self) -> Dumped {
        self.dumped
    }

    /// Number of bytes read so far.
    pub(super) fn bytes(&self) -> u64 {
        self.input.bytes
    }
}

fn cut(_: Error) -> &'static str {
    "the file is truncated"
}

/// A reader or writer that computes the checksum of its bytes.
struct Checksummed<T> {
    inner: T,
    crc: u32,
    bytes: u64,
}

impl<T> Checksummed<T> {
    fn new(inner: T) -> Self {
        Self { inner, crc: 0, bytes: 0 }
    }

    fn add(&mut self, bytes: Option<&[u8]>) {
        let bytes = bytes.unwrap_or_default();
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.bytes += bytes.len() as u64;
    }
}

impl<T: Read> Checksummed<T> {
    fn u32(&mut self) -> std::io::Result<u32> {
        let mut bytes = [0; 4];
        self.read_exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}

impl<T: Read> Read for Checksummed<T> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(out)?;
        self.add(out.get(..count));
        Ok(count)
    }
}

impl<T: Write> Write for Checksummed<T> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.add(bytes.get(..count));
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}
