//! Tests of the header: round trip, damage, limits.

use proptest::prelude::*;

use crate::rpc::frame::{FrameError, HEADER_BYTES, Header, Kind};
use crate::rpc::message::Limits;

fn header() -> Header {
    Header {
        kind: Kind::Request,
        class: 3,
        request_id: 0x0102_0304_0506_0708,
        message_bytes: 10,
        payload_bytes: 20,
        time_ms: 30,
        message_crc: 40,
    }
}

#[test]
fn a_header_survives_a_round_trip() {
    assert_eq!(Header::decode(&header().encode(), &Limits::default()), Ok(header()));
}

#[test]
fn every_flipped_bit_is_detected() {
    for bit in 0..HEADER_BYTES * 8 {
        let mut bytes = header().encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::decode(&bytes, &Limits::default()).is_err(), "bit {bit}");
    }
}

#[test]
fn a_length_over_the_bound_is_refused() {
    let limits = Limits { message_bytes_max: 9, payload_bytes_max: 20 };
    assert_eq!(
        Header::decode(&header().encode(), &limits),
        Err(FrameError::TooLarge { part: "message", bytes: 10, bytes_max: 9 })
    );
}

proptest! {
    #[test]
    fn no_bytes_cause_a_panic(bytes in prop::array::uniform32(any::<u8>())) {
        let mut all = [0; HEADER_BYTES];
        all[..32].copy_from_slice(&bytes);
        prop_assert!(Header::decode(&all, &Limits::default()).is_err());
    }
}
