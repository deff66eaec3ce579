//! What ranks are told before they trust each other, nearly right: refused by name or within every
//! bound, and never a panic.

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use hfreduce_testing::{cases, changed, changes, edited, edits};
use proptest::prelude::*;

use super::regroup::fuzzed_epoch;
use super::*;
use crate::cause::Cause;
use crate::core::regroup::{Agreement, Word};
use crate::flight::Folders;
use crate::line::Line;

const KEY: [u8; 32] = [7; 32];

fn options(rank: u32) -> Options {
    let placement = ["a", "a", "b"].map(|node| (node.to_owned(), "z".to_owned())).to_vec();
    Options { folders: Folders::default(), ..Options::new(rank, placement) }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

#[test]
fn an_info_that_is_nearly_right_is_blamed_on_its_rank() {
    let endpoints = [0, 1, 2].map(|rank| Endpoint::new(options(rank), &KEY).unwrap());
    let infos = endpoints.each_ref().map(Endpoint::info);
    let document: serde_json::Value = serde_json::from_slice(&infos[1]).unwrap();
    let property = |(edits, changes): (Vec<_>, Vec<_>)| {
        let words = edited(&document, &edits).into_bytes();
        for words in [changed(&words, &changes), words] {
            let told = [infos[0].clone(), words, infos[2].clone()];
            match endpoints[0].read_infos(&told) {
                Ok(read) => {
                    prop_assert_eq!((read.len(), read[1].rank), (3, 1));
                    prop_assert!((1..=2).contains(&endpoints[0].channels(&read)));
                }
                Err(error) => prop_assert_eq!(error.cause.peer, Some(1)),
            }
        }
        Ok(())
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(1000));
    runner.run(&(edits(), changes()), property).unwrap();
}

#[test]
fn cards_that_are_nearly_right_make_an_epoch_or_none() {
    let endpoint = Endpoint::new(options(0), &KEY).unwrap();
    let other = Endpoint::new(options(2), &KEY).unwrap();
    let card = |endpoint: &Endpoint| endpoint.options.info(&endpoint.home, 0, &Doors::default());
    let cards = [&endpoint, &other].map(|of| serde_json::to_value(card(of)).unwrap());
    let property = |(which, edits): (usize, Vec<_>)| {
        let mut told: Vec<String> = cards.iter().map(ToString::to_string).collect();
        told[which] = edited(&cards[which], &edits);
        let agreed = Agreement { epoch: 1, chance: 2, cards: told };
        let (home, options) = (endpoint.home.clone(), endpoint.options.clone());
        if let Some((infos, placement)) = fuzzed_epoch(home, options, &agreed) {
            prop_assert_eq!((infos, placement), (2, 2));
        }
        Ok(())
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(1000));
    runner.run(&(0..2_usize, edits()), property).unwrap();
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn words_between_members_end_the_line_or_are_words(edits in edits(), changes in changes()) {
        let word = Word::Welcome { epoch: 3, chance: 9, cards: vec!["card".into(), "é".into()] };
        let text = edited(&serde_json::to_value(&word).unwrap(), &edits);
        let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
        bytes.extend(text.bytes());
        let (mut one, other) = pair();
        let bytes = changed(&bytes, &changes);
        one.write_all(&bytes).unwrap();
        drop(one);
        let mut line = Line::new(other).unwrap();
        let mut words = 0;
        while line.ended().is_none() {
            words += usize::from(line.next_word::<Word>().is_some());
        }
        while line.next_word::<Word>().is_some() {
            words += 1;
        }
        prop_assert!(words <= bytes.len() / 5, "{words} words");
    }

    #[test]
    fn a_reason_that_is_nearly_one_is_a_reason(edits in edits(), changes in changes()) {
        let cause = Cause::new(CauseKind::PeerDied, 1, "gone").blaming(2, "b").during("x", 3, "y");
        let text = edited(&serde_json::to_value(&cause).unwrap(), &edits).into_bytes();
        for bytes in [changed(&text, &changes), text] {
            let read = Cause::decode(&bytes, 0);
            prop_assert!(!read.culprit().is_empty());
            prop_assert!(read.encode().len() <= crate::cause::CAUSE_BYTES_MAX);
        }
    }

    #[test]
    fn greetings_that_are_nearly_right_are_refused_or_whole(changes in changes()) {
        let hello = Hello { group: 7, from: 1, purpose: Purpose::Tree, stream: 3 };
        if let Some(read) = Hello::decode(&changed(&hello.encode(), &changes)) {
            prop_assert_eq!(Hello::decode(&read.encode()), Some(read));
        }
    }
}
