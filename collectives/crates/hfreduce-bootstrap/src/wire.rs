//! Wire format of the TCP rendezvous, after both sides have proved that they hold the key.
//!
//! ```text
//! client  "HFMEET02" world:u32 rank:u32 phase:u32+bytes value:u32+bytes
//! server  0x00 blob:u32+bytes          the values of all ranks, as `bundle` packs them
//!         0x01 absent:u32 absent × (rank:u32) detail:u32+bytes
//! ```
//! All numbers are little-endian. Lengths are checked before memory is taken for them. The second
//! answer is the same in every release, so that a client of another release can read the reason of
//! its refusal.

use std::io::{self, Read, Write};

use crate::bundle;

const MAGIC: &[u8; 8] = b"HFMEET02";
/// The longest value of a rank, in bytes.
pub const VALUE_BYTES_MAX: usize = 64 << 10;
/// The longest name of a phase, in bytes.
pub const PHASE_BYTES_MAX: usize = 64;
/// The largest group.
pub(crate) const WORLD_MAX: u32 = 1 << 16;
const DETAIL_BYTES_MAX: usize = 1024;

/// The request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) world: u32,
    pub(crate) rank: u32,
    pub(crate) phase: String,
    pub(crate) value: Vec<u8>,
}

/// The answer of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// One blob, packed once and the same for every client.
    Values(Vec<u8>),
    Failed {
        absent: Vec<u32>,
        detail: String,
    },
}

impl Request {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.world.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        put(&mut bytes, self.phase.as_bytes());
        put(&mut bytes, &self.value);
        to.write_all(&bytes)
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut magic = [0; 8];
        from.read_exact(&mut magic)?;
        if &magic != MAGIC {
            return Err(invalid(format!(
                "it starts with {magic:02x?}, expected {MAGIC:02x?}: install the same release on \
                 all ranks"
            )));
        }
        let world = number(from)?;
        let rank = number(from)?;
        if world > WORLD_MAX || rank >= world {
            return Err(invalid(format!("invalid rank {rank} of {world}")));
        }
        let phase = take(from, PHASE_BYTES_MAX)?;
        let phase = String::from_utf8(phase).map_err(|_| invalid("a phase is text".into()))?;
        let value = take(from, VALUE_BYTES_MAX)?;
        Ok(Self { world, rank, phase, value })
    }
}

impl Answer {
    /// A failure without absent ranks.
    pub(crate) fn failed(detail: String) -> Self {
        Self::Failed { absent: vec![], detail }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Values(blob) => {
                bytes.push(0);
                put(&mut bytes, blob);
            }
            Self::Failed { absent, detail } => {
                bytes.push(1);
                bytes.extend((absent.len() as u32).to_le_bytes());
                absent.iter().for_each(|rank| bytes.extend(rank.to_le_bytes()));
                let mut end = detail.len().min(DETAIL_BYTES_MAX);
                while !detail.is_char_boundary(end) {
                    end -= 1;
                }
                put(&mut bytes, &detail.as_bytes()[..end]);
            }
        }
        bytes
    }

    pub(crate) fn read(from: &mut impl Read, world: u32) -> io::Result<Self> {
        let mut kind = [0];
        from.read_exact(&mut kind)?;
        match kind {
            [0] => Ok(Self::Values(take(from, bundle::blob_bytes_max(world as usize))?)),
            [1] => {
                let count = number(from)?;
                if count > world {
                    return Err(invalid(format!("{count} of {world} ranks are absent")));
                }
                let absent = (0..count).map(|_| number(from)).collect::<io::Result<_>>()?;
                let detail = String::from_utf8_lossy(&take(from, DETAIL_BYTES_MAX)?).into_owned();
                Ok(Self::Failed { absent, detail })
            }
            [kind] => Err(invalid(format!("invalid answer of kind {kind}"))),
        }
    }
}

fn put(bytes: &mut Vec<u8>, value: &[u8]) {
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend(value);
}

fn number(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn take(from: &mut impl Read, bytes_max: usize) -> io::Result<Vec<u8>> {
    let bytes = number(from)? as usize;
    if bytes > bytes_max {
        return Err(invalid(format!("{bytes} bytes are announced, expected at most {bytes_max}")));
    }
    // Memory grows with what arrives, not with what is announced.
    let mut value = Vec::new();
    match from.take(bytes as u64).read_to_end(&mut value)? {
        read if read == bytes => Ok(value),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn invalid(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hfreduce_testing::{cases, changed, changes};
    use proptest::prelude::*;

    fn request() -> impl Strategy<Value = Request> {
        (1..=WORLD_MAX, any::<u32>(), "[a-z]{0,20}", prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(world, rank, phase, value)| Request {
                world,
                rank: rank % world,
                phase,
                value,
            })
    }

    proptest! {
        #![proptest_config(cases(2000))]

        #[test]
        fn changed_messages_are_refused_or_read_within_their_bounds(
            request in request(), changes in changes(), world in 1..5_u32,
        ) {
            let mut bytes = Vec::new();
            request.write(&mut bytes).unwrap();
            if let Ok(read) = Request::read(&mut changed(&bytes, &changes).as_slice()) {
                prop_assert!(read.world <= WORLD_MAX && read.rank < read.world);
                prop_assert!(read.phase.len() <= PHASE_BYTES_MAX);
                prop_assert!(read.value.len() <= VALUE_BYTES_MAX);
            }
            let answers = [
                Answer::Values(request.value),
                Answer::Failed { absent: (0..world).collect(), detail: request.phase },
            ];
            for answer in answers {
                let bytes = changed(&answer.encode(), &changes);
                match Answer::read(&mut bytes.as_slice(), world) {
                    Ok(Answer::Values(blob)) => {
                        prop_assert!(blob.len() <= bundle::blob_bytes_max(world as usize));
                    }
                    Ok(Answer::Failed { absent, detail }) => {
                        prop_assert!(absent.len() <= world as usize);
                        // Each byte of invalid UTF-8 becomes three bytes.
                        prop_assert!(detail.len() <= 3 * DETAIL_BYTES_MAX);
                    }
                    Err(_) => {}
                }
            }
        }
    }

    proptest! {
        #[test]
        fn a_written_request_is_read(request in request(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            request.write(&mut bytes).unwrap();
            prop_assert_eq!(&Request::read(&mut bytes.as_slice()).unwrap(), &request);
            let part = &bytes[..cut.index(bytes.len())];
            prop_assert!(Request::read(&mut &part[..]).is_err());
        }

        #[test]
        fn lengths_in_garbage_are_not_trusted(
            garbage in prop::collection::vec(any::<u8>(), 0..200), world in 1..4_u32,
        ) {
            let mut request = MAGIC.to_vec();
            request.extend(&garbage);
            let _ = Request::read(&mut garbage.as_slice());
            let _ = Request::read(&mut request.as_slice());
            let _ = Answer::read(&mut garbage.as_slice(), world);
        }

        #[test]
        fn a_written_answer_is_read(
            blob in prop::collection::vec(any::<u8>(), 0..50), world in 4..9_u32,
            absent in prop::collection::vec(0..4_u32, 0..4), detail in ".{0,400}",
        ) {
            let failure = Answer::Failed { absent, detail: detail.clone() };
            let Answer::Failed { detail: read, .. } =
                Answer::read(&mut failure.encode().as_slice(), world).unwrap()
            else {
                panic!("a failure became values");
            };
            prop_assert!(detail.starts_with(&read));
            let values = Answer::Values(blob);
            prop_assert_eq!(Answer::read(&mut values.encode().as_slice(), world).unwrap(), values);
        }
    }
}
