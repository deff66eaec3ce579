//! The values of all ranks as one compressed blob.
//!
//! ```text
//! blob   zlib(ranks × (length:u32), ranks × value)
//! ```
//! The values of the ranks are nearly equal: common names, sizes and versions are stored once, and
//! each rank adds the random parts of its value. Numbers are little-endian. A blob that is longer
//! than the values of the group can be is refused, before and during decompression.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;

/// Room for each rank on average, in bytes: a rank with 16 addresses and long names needs 1,500.
const RANK_BYTES_MAX: usize = 4 << 10;
/// Room that small groups have in addition, so that one long value fits.
const GROUP_BYTES_MAX: usize = 64 << 10;
const LENGTH_BYTES: usize = size_of::<u32>();

/// Why a blob cannot be created or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// The values are longer than those of a group of this size can be.
    #[error(
        "the values of {ranks} ranks take {bytes} bytes or more, and at most {max} are possible"
    )]
    TooLong {
        /// How many ranks there are.
        ranks: usize,
        /// Bytes of the values, or bytes that were decompressed before the limit.
        bytes: usize,
        /// The limit of a group of this size.
        max: usize,
    },
    /// Damaged, or created by another release or program.
    #[error("the values of {ranks} ranks cannot be read ({detail}): install the same release")]
    Damaged {
        /// How many ranks there are.
        ranks: usize,
        /// What is wrong.
        detail: String,
    },
}

/// The longest values of a group of `ranks`, their lengths included, in bytes.
pub(crate) const fn values_bytes_max(ranks: usize) -> usize {
    ranks.saturating_mul(RANK_BYTES_MAX).saturating_add(GROUP_BYTES_MAX)
}

/// The longest blob of such a group: bytes that cannot be compressed are stored in blocks with heads.
pub const fn blob_bytes_max(ranks: usize) -> usize {
    let plain = values_bytes_max(ranks);
    plain.saturating_add(plain / 1000 + 64)
}

/// One blob of the values in rank order.
///
/// # Errors
/// [`BundleError::TooLong`].
pub fn pack<V: AsRef<[u8]>>(values: &[V]) -> Result<Vec<u8>, BundleError> {
    let ranks = values.len();
    let bytes = values.iter().map(|value| LENGTH_BYTES + value.as_ref().len()).sum();
    refuse_longer(ranks, bytes)?;
    let mut plain = Vec::with_capacity(bytes);
    for value in values {
        plain.extend((value.as_ref().len() as u32).to_le_bytes());
    }
    values.iter().for_each(|value| plain.extend(value.as_ref()));
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let packed = encoder.write_all(&plain).and_then(|()| encoder.finish());
    packed.map_err(|error| damaged(ranks, &error))
}

/// The values of `ranks` ranks, in rank order.
///
/// # Errors
/// [`BundleError`]; memory is allocated for at most the values of a group of this size.
pub fn unpack(blob: &[u8], ranks: usize) -> Result<Vec<Vec<u8>>, BundleError> {
    let max = values_bytes_max(ranks);
    let mut decoder = ZlibDecoder::new(blob);
    let mut plain = Vec::new();
    let read = decoder.by_ref().take((max as u64).saturating_add(1)).read_to_end(&mut plain);
    read.map_err(|error| damaged(ranks, &error))?;
    refuse_longer(ranks, plain.len())?;
    if decoder.total_in() != blob.len() as u64 {
        let extra = blob.len() as u64 - decoder.total_in();
        return Err(damaged(ranks, &format!("{extra} bytes follow its end")));
    }
    cut(&plain, ranks)
}

fn cut(plain: &[u8], ranks: usize) -> Result<Vec<Vec<u8>>, BundleError> {
    let Some((lengths, mut rest)) = plain.split_at_checked(ranks.saturating_mul(LENGTH_BYTES))
    else {
        return Err(damaged(ranks, &format!("{} bytes hold fewer lengths", plain.len())));
    };
    let mut values = Vec::with_capacity(ranks);
    for (rank, length) in lengths.as_chunks().0.iter().enumerate() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((value, others)) = rest.split_at_checked(length) else {
            let remaining = rest.len();
            let problem = format!("rank {rank} has {length} bytes of {remaining}");
            return Err(damaged(ranks, &problem));
        };
        values.push(value.to_vec());
        rest = others;
    }
    match rest.len() {
        0 => Ok(values),
        more => Err(damaged(ranks, &format!("{more} bytes belong to no rank"))),
    }
}

fn refuse_longer(ranks: usize, bytes: usize) -> Result<(), BundleError> {
    let max = values_bytes_max(ranks);
    if bytes > max { Err(BundleError::TooLong { ranks, bytes, max }) } else { Ok(()) }
}

fn damaged(ranks: usize, detail: &dyn ToString) -> BundleError {
    BundleError::Damaged { ranks, detail: detail.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hfreduce_testing::{cases, changed, changes};
    use proptest::prelude::*;

    fn zlib(plain: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    proptest! {
        #![proptest_config(cases(500))]

        #[test]
        fn packed_values_are_read_and_damage_is_refused_or_bounded(
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..6),
            changes in changes(),
        ) {
            let blob = pack(&values).unwrap();
            prop_assert!(blob.len() <= blob_bytes_max(values.len()));
            prop_assert_eq!(unpack(&blob, values.len()).unwrap(), values.clone());
            prop_assert!(unpack(&blob, values.len() + 1).is_err());
            for damage in [changed(&blob, &changes), zlib(&changed(&blob, &changes))] {
                if let Ok(read) = unpack(&damage, values.len()) {
                    prop_assert_eq!(read.len(), values.len());
                }
            }
        }
    }

    #[test]
    fn values_above_the_limit_of_the_group_are_refused_with_their_size() {
        let max = values_bytes_max(2);
        // A decompression bomb: 64 KiB that become 64 MiB.
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        for _ in 0..64 {
            encoder.write_all(&vec![0; 1 << 20]).unwrap();
        }
        let bomb = encoder.finish().unwrap();
        let refused = BundleError::TooLong { ranks: 2, bytes: max + 1, max };
        assert_eq!(unpack(&bomb, 2).unwrap_err(), refused);
        let text = refused.to_string();
        assert!(text.contains("2 ranks") && text.contains(&max.to_string()), "{text}");
        let values = [vec![0; max - 2 * LENGTH_BYTES], vec![]];
        assert_eq!(unpack(&pack(&values).unwrap(), 2).unwrap(), values);
        let longer = [vec![0; max - 2 * LENGTH_BYTES], vec![0]];
        assert!(
            matches!(pack(&longer), Err(BundleError::TooLong { bytes, .. }) if bytes == max + 1)
        );
    }

    #[test]
    fn bytes_that_cannot_be_compressed_fit_into_the_longest_blob() {
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(values_bytes_max(64) - 64 * LENGTH_BYTES)
        .collect();
        let mut values = vec![Vec::new(); 63];
        values.push(noise);
        assert!(pack(&values).unwrap().len() <= blob_bytes_max(64));
    }

    #[test]
    fn errors_describe_the_damage() {
        let lengths = |lengths: &[u32], rest: &[u8]| {
            let mut plain: Vec<u8> =
                lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
            plain.extend(rest);
            zlib(&plain)
        };
        let mut followed = lengths(&[1, 1], b"ab");
        followed.push(0);
        let complete = lengths(&[1, 1], b"ab");
        let damages = [
            (vec![], "incomplete"),
            (b"GET / HTTP/1.0".to_vec(), "corrupt"),
            (complete[..complete.len() - 1].to_vec(), "incomplete"),
            (lengths(&[1], b""), "fewer lengths"),
            (lengths(&[1, u32::MAX], b"ab"), "rank 1 has 4294967295 bytes of 1"),
            (lengths(&[1, 1], b"abc"), "1 bytes belong to no rank"),
            (followed, "1 bytes follow its end"),
        ];
        for (blob, reason) in damages {
            let text = unpack(&blob, 2).unwrap_err().to_string();
            assert!(text.contains(reason) && text.contains("same release"), "{text}");
        }
    }
}
