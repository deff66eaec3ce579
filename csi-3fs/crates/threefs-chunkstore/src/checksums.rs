//! Checksums: one per 4 KiB block, combined into the checksum of the chunk.

use std::sync::OnceLock;

use threefs_core::checksum::Checksum;
use threefs_core::chunk::BLOCK_BYTES;

/// Returns one checksum per block; the last block may be shorter.
pub(crate) fn of_blocks(content: &[u8]) -> Vec<u32> {
    content.chunks(BLOCK_BYTES).map(of_block).collect()
}

fn of_block(block: &[u8]) -> u32 {
    static OF_ZEROS: OnceLock<u32> = OnceLock::new();
    match block.len() == BLOCK_BYTES && is_zeros(block) {
        true => *OF_ZEROS.get_or_init(|| crc32c::crc32c(&[0; BLOCK_BYTES])),
        false => crc32c::crc32c(block),
    }
}

/// Whether all bytes are zero.
pub(crate) fn is_zeros(bytes: &[u8]) -> bool {
    let parts = bytes.chunks_exact(64);
    let rest = parts.remainder();
    rest.iter().all(|byte| *byte == 0)
        && parts.into_iter().all(|part| part.iter().fold(0, |any, byte| any | byte) == 0)
}

/// Number of blocks of `length` bytes.
pub(crate) fn blocks_of(length: usize) -> usize {
    length.div_ceil(BLOCK_BYTES)
}

/// The checksum of the whole content of `length` bytes.
pub(crate) fn of_whole(blocks: &[u32], length: usize) -> Checksum {
    let Some((&last, full)) = blocks.split_last() else { return Checksum(0) };
    if full.is_empty() {
        return Checksum(last);
    }
    let before = full.iter().fold(0, |sum, &next| shift_block(sum) ^ next);
    let last_bytes = length - full.len() * BLOCK_BYTES;
    if last_bytes == BLOCK_BYTES {
        return Checksum(shift_block(before) ^ last);
    }
    Checksum(before).followed_by(Checksum(last), last_bytes)
}

/// Extends a checksum by a block of zeros: linear in its bits, so four one-byte tables suffice (the
/// general way takes about 50 µs, 256 times per chunk).
fn shift_block(sum: u32) -> u32 {
    static TABLES: OnceLock<[[u32; 256]; 4]> = OnceLock::new();
    let tables = TABLES.get_or_init(|| {
        let mut tables = [[0; 256]; 4];
        for (position, table) in tables.iter_mut().enumerate() {
            for (value, entry) in table.iter_mut().enumerate() {
                let bits = (value as u32) << (8 * position);
                *entry = crc32c::crc32c_combine(bits, 0, BLOCK_BYTES);
            }
        }
        tables
    });
    let bytes = sum.to_le_bytes();
    tables.iter().zip(bytes).fold(0, |shifted, (table, byte)| shifted ^ table[usize::from(byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_checksum_is_derived_from_the_blocks() {
        for length in [0, 1, 4095, 4096, 4097, 3 * 4096, 70_000] {
            let content: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
            let blocks = of_blocks(&content);
            assert_eq!(blocks.len(), blocks_of(length));
            assert_eq!(of_whole(&blocks, length), Checksum::of(&content), "{length} bytes");
        }
    }
}
