//! Any bytes in a ring are harmless, and every valid entry survives its encoding.
#![allow(missing_docs)]

use proptest::prelude::*;
use threefs_rings::control::{Number, Register, RegisterFile, Session, Submit};
use threefs_rings::{
    Access, Completion, ENTRIES_MAX, FileTerms, HEADER_BYTES, Layout, RegionTerms, RingTerms,
    SUBMISSION_BYTES, Submission, check,
};

/// Numbers around the limits of the integers, where additions overflow.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..10_000u64,
        (0..10_000u64).prop_map(|n| u64::MAX - n),
        (0..10_000u64).prop_map(|n| (1 << 63) - n),
    ]
}

fn terms() -> impl Strategy<Value = (RingTerms, Option<RegionTerms>, Option<FileTerms>)> {
    let region = (number(), prop_oneof![Just(0), number()])
        .prop_map(|(bytes, block)| RegionTerms { bytes, block });
    let access = (any::<bool>(), any::<bool>())
        .prop_map(|(read, write)| FileTerms { access: Access { read, write } });
    (
        (1..=ENTRIES_MAX, any::<bool>())
            .prop_map(|(entries, for_read)| RingTerms { entries, for_read }),
        proptest::option::weighted(0.9, region),
        proptest::option::weighted(0.9, access),
    )
}

fn submission() -> impl Strategy<Value = Submission> {
    let wild = any::<[u8; SUBMISSION_BYTES]>().prop_map(|bytes| Submission::decode(&bytes));
    let near = (0..ENTRIES_MAX, 0..4u32, number(), number(), number()).prop_map(
        |(slot, region, memory_offset, file_offset, length)| Submission {
            slot,
            region,
            file: 1,
            reserved: 0,
            memory_offset,
            file_offset,
            length,
        },
    );
    prop_oneof![wild, near]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn an_accepted_submission_stays_inside_memory_and_file(
        entry in submission(), (ring, region, file) in terms()
    ) {
        let Ok(accepted) = check(&entry, ring, region, file) else { return Ok(()) };
        let (region, file) = (region.unwrap(), file.unwrap());
        // In a type in which nothing overflows.
        let wide = |low: u64, length: u64| u128::from(low) + u128::from(length);
        prop_assert!(accepted.length > 0);
        prop_assert!(wide(accepted.memory_offset, accepted.length) <= u128::from(region.bytes));
        prop_assert!(wide(accepted.file_offset, accepted.length) <= i64::MAX as u128);
        prop_assert!(entry.slot < ring.entries);
        let permitted = if ring.for_read { file.access.read } else { file.access.write };
        prop_assert!(permitted);
        if region.block > 0 {
            let last = wide(accepted.memory_offset, accepted.length) - 1;
            let first = u128::from(accepted.memory_offset);
            prop_assert_eq!(first / u128::from(region.block), last / u128::from(region.block));
        }
    }

    #[test]
    fn entries_and_messages_survive_their_encoding(
        entry in submission(), result in any::<i64>(), words in any::<[u32; 8]>(), id in any::<[u8; 16]>()
    ) {
        prop_assert_eq!(Submission::decode(&entry.encode()), entry);
        let completion = Completion { slot: entry.slot, result };
        prop_assert_eq!(Completion::decode(&completion.encode()), completion);
        let [entries, flags, limit, start, number, user, version, kind] = words;
        let (bytes, block) = (entry.length, entry.file_offset);
        let register = Register { id, bytes, block, entries, flags, limit, start, number };
        prop_assert_eq!(Register::decode(&register.encode()), Some(register));
        let session = Session { token: id, user, version };
        prop_assert_eq!(Session::decode(&session.encode()), Some(session));
        let number = Number { kind, number };
        prop_assert_eq!(Number::decode(&number.encode()), Some(number));
        let submit = Submit { ring: kind, tail: start };
        prop_assert_eq!(Submit::decode(&submit.encode()), Some(submit));
        let file = RegisterFile { token: id, number: kind };
        prop_assert_eq!(RegisterFile::decode(&file.encode()), Some(file));
    }

    #[test]
    fn short_messages_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        prop_assert_eq!(Register::decode(&bytes).is_some(), bytes.len() >= 52);
        prop_assert_eq!(Session::decode(&bytes).is_some(), bytes.len() >= Session::BYTES);
        prop_assert_eq!(Submit::decode(&bytes).is_some(), bytes.len() >= Submit::BYTES);
        prop_assert_eq!(Number::decode(&bytes).is_some(), bytes.len() >= Number::BYTES);
        prop_assert_eq!(RegisterFile::decode(&bytes).is_some(), bytes.len() >= RegisterFile::BYTES);
    }

    #[test]
    fn entries_in_flight_do_not_overlap(
        wanted in 1..=ENTRIES_MAX, number in any::<u32>(), behind in 1..ENTRIES_MAX
    ) {
        let layout = Layout::for_entries(wanted).unwrap();
        prop_assert!(layout.entries() >= wanted && layout.entries() / 2 < wanted);
        prop_assert_eq!(Layout::new(layout.entries()), Some(layout));
        let (submission, completion) = (layout.submission(number), layout.completion(number));
        prop_assert!(submission >= HEADER_BYTES);
        prop_assert!(submission + SUBMISSION_BYTES <= layout.completion(0));
        prop_assert!(completion >= layout.completion(0) && completion + 16 <= layout.bytes());
        let run = layout.contiguous(number, wanted);
        prop_assert!(run >= 1 && run <= wanted);
        prop_assert!(submission + run as usize * SUBMISSION_BYTES <= layout.completion(0));
        // Also where the numbers wrap around.
        if behind < layout.entries() {
            prop_assert_ne!(layout.submission(number.wrapping_add(behind)), submission);
        }
    }
}

#[test]
fn a_ring_has_a_power_of_two_of_entries_up_to_the_maximum() {
    for entries in [0, 3, 2 * ENTRIES_MAX] {
        assert_eq!(Layout::new(entries), None, "{entries}");
    }
    assert!(Layout::for_entries(0).is_none() && Layout::for_entries(ENTRIES_MAX + 1).is_none());
    assert_eq!(Layout::for_entries(1).map(Layout::entries), Some(1));
}
