//! Fuzz tests of messages that are received before authentication: modified ones are rejected with
//! the rank, or within all bounds, without a panic.

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use hfreduce_testing::{cases, changed, changes, edited, edits};
use proptest::prelude::*;

use super::reconfigure::fuzzed_epoch;
use super::*;
use hfreduce_core::error::AbortReason;
use hfreduce_core::reconfigure::{Agreement, Message};
use hfreduce_shm::flight::Folders;
use hfreduce_transport::message_socket::MessageSocket;

const KEY: [u8; 32] = [7; 32];

fn options(rank: u32) -> Options {
    let placement = ["a", "a", "b"].map(|node| (node.to_owned(), "z".to_owned())).to_vec();
    Options { folders: Folders::default(), ..Options::new(rank, placement) }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

#[test]
fn a_damaged_info_is_attributed_to_its_rank() {
    let endpoints = [0, 1, 2].map(|rank| Endpoint::new(options(rank), &KEY).unwrap());
    let infos = endpoints.each_ref().map(Endpoint::info);
    let document: serde_json::Value = serde_json::from_slice(&infos[1]).unwrap();
    let property = |(edits, changes): (Vec<_>, Vec<_>)| {
        let messages = edited(&document, &edits).into_bytes();
        for messages in [changed(&messages, &changes), messages] {
            let received = [infos[0].clone(), messages, infos[2].clone()];
            match endpoints[0].read_infos(&received) {
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
fn damaged_infos_lead_to_a_valid_epoch_or_an_error() {
    let endpoint = Endpoint::new(options(0), &KEY).unwrap();
    let other = Endpoint::new(options(2), &KEY).unwrap();
    let info = |endpoint: &Endpoint| {
        endpoint.identity.info(&endpoint.options, 0, &LocalSockets::default())
    };
    let infos = [&endpoint, &other].map(|of| serde_json::to_value(info(of)).unwrap());
    let property = |(which, edits): (usize, Vec<_>)| {
        let mut received: Vec<String> = infos.iter().map(ToString::to_string).collect();
        received[which] = edited(&infos[which], &edits);
        let agreed = Agreement { epoch: 1, nonce: 2, infos: received };
        let (identity, options) = (endpoint.identity.clone(), endpoint.options.clone());
        if let Some((infos, placement)) = fuzzed_epoch(identity, options, &agreed) {
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
    fn damaged_member_messages_are_parsed_or_end_the_connection(edits in edits(), changes in changes()) {
        let message = Message::Welcome { epoch: 3, nonce: 9, infos: vec!["card".into(), "é".into()] };
        let text = edited(&serde_json::to_value(&message).unwrap(), &edits);
        let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
        bytes.extend(text.bytes());
        let (mut sender, receiver) = pair();
        let bytes = changed(&bytes, &changes);
        sender.write_all(&bytes).unwrap();
        drop(sender);
        let mut line = MessageSocket::new(receiver).unwrap();
        let mut messages = 0;
        while line.end_reason().is_none() {
            messages += usize::from(line.next_message::<Message>().is_some());
        }
        while line.next_message::<Message>().is_some() {
            messages += 1;
        }
        prop_assert!(messages <= bytes.len() / 5, "{messages} messages");
    }

    #[test]
    fn a_damaged_abort_reason_is_decoded(edits in edits(), changes in changes()) {
        let cause = AbortReason::new(ErrorKind::PeerDied, 1, "gone").with_peer(2, "b").during("x", 3, "y");
        let text = edited(&serde_json::to_value(&cause).unwrap(), &edits).into_bytes();
        for bytes in [changed(&text, &changes), text] {
            let read = AbortReason::decode(&bytes, 0);
            prop_assert!(!read.peer_description().is_empty());
            prop_assert!(read.encode().len() <= hfreduce_core::error::REASON_BYTES_MAX);
        }
    }

    #[test]
    fn modified_hello_messages_are_refused_or_whole(changes in changes()) {
        let hello = Hello { group: 7, from: 1, purpose: Purpose::Tree, stream: 3 };
        if let Some(read) = Hello::decode(&changed(&hello.encode(), &changes)) {
            prop_assert_eq!(Hello::decode(&read.encode()), Some(read));
        }
    }
}
