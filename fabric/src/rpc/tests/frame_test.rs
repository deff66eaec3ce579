//! Tests of the header: round trip, damage, limits.

use std::time::Duration;

use proptest::prelude::*;

use crate::rpc::frame::{FrameError, HEADER_BYTES, Header, Kind, read_body};
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

/// Otherwise a storage service copies it before it is written to the disk.
#[tokio::test]
async fn a_large_payload_starts_at_a_multiple_of_4_kib() {
    let message_crc = crc32c::crc32c(&[7; 3]);
    for payload_bytes in [0, 1, (64 << 10) - 1, 64 << 10, (300 << 10) + 1] {
        let header = Header { payload_bytes, message_bytes: 3, message_crc, ..header() };
        let sent: Vec<u8> = (0..payload_bytes).map(|at| (at % 251) as u8).collect();
        let body = [&[7; 3], sent.as_slice(), b"next"].concat();
        let mut reader = body.as_slice();
        let read = read_body(&mut reader, &header, Duration::from_secs(60)).await;
        let Ok((message, payload)) = read else { panic!("{payload_bytes}: not read") };
        assert_eq!((message.as_ref(), payload.as_ref()), ([7; 3].as_slice(), sent.as_slice()));
        assert_eq!(reader, b"next");
        assert!(payload_bytes < 64 << 10 || payload.as_ptr().align_offset(4096) == 0);
    }
}

proptest! {
    #[test]
    fn no_bytes_cause_a_panic(bytes in prop::array::uniform32(any::<u8>())) {
        let mut all = [0; HEADER_BYTES];
        all[..32].copy_from_slice(&bytes);
        prop_assert!(Header::decode(&all, &Limits::default()).is_err());
    }
}
