use super::*;
use proptest::prelude::*;

fn ring() -> KeyRing {
    KeyRing::parse(Path::new("ring"), b"3:0123456789abcdef0123456789abcdef").unwrap()
}

fn ticket() -> Ticket {
    Ticket {
        cluster: "default".into(),
        key_id: 0,
        directory: 77,
        path: "/volumes/pvc-1".into(),
        read_only: false,
        node: "node-1".into(),
        expires_unix_s: 1_900_000_000,
    }
}

#[test]
fn a_sealed_file_can_be_read_back() {
    let sealed = ticket().seal(&ring()).unwrap();
    assert_eq!(sealed.ticket().key_id, 3);
    let text = sealed.to_text();
    assert!(SealedTicket::is_text(text.as_bytes()));
    let read = SealedTicket::parse(Path::new("t"), text.as_bytes()).unwrap();
    assert_eq!(read.ticket(), sealed.ticket());
    assert_eq!(read.bytes(), sealed.bytes());
    assert_eq!(read.secret().bytes(), sealed.secret().bytes());
}

#[test]
fn the_ring_key_and_other_tickets_do_not_reveal_the_secret() {
    let one = ticket().seal(&ring()).unwrap();
    let other = Ticket { directory: 78, ..ticket() }.seal(&ring()).unwrap();
    assert_ne!(one.secret().bytes(), other.secret().bytes());
    assert_ne!(one.secret().bytes(), ring().signing().1.bytes());
}

#[test]
fn a_ticket_is_valid_while_its_key_is_in_the_ring() {
    let sealed = ticket().seal(&ring()).unwrap();
    assert!(sealed.is_genuine(&ring()));
    let parse = |content: &[u8]| KeyRing::parse(Path::new("ring"), content).unwrap();
    let rotated = parse(b"4:fedcba9876543210fedcba9876543210\n3:0123456789abcdef0123456789abcdef");
    assert!(sealed.is_genuine(&rotated));
    assert!(!sealed.is_genuine(&parse(b"4:fedcba9876543210fedcba9876543210")));
    // The same id, another key.
    assert!(!sealed.is_genuine(&parse(b"3:fedcba9876543210fedcba9876543210")));
    let other = Ticket { directory: 78, ..ticket() }.seal(&ring()).unwrap();
    let forged = SealedTicket { bytes: other.bytes.clone(), ..sealed };
    assert!(!forged.is_genuine(&ring()));
}

#[test]
fn fields_are_bounded_and_a_long_path_is_truncated() {
    let long = |field: &str, value: String| {
        let mut ticket = ticket();
        match field {
            "cluster" => ticket.cluster = value,
            _ => ticket.node = value,
        }
        ticket.seal(&ring()).unwrap_err().to_string()
    };
    assert!(long("cluster", "c".repeat(64)).contains("cluster"));
    assert!(long("node", "n".repeat(254)).contains("node"));
    assert!(long("node", "a\nb".into()).contains("control"));
    let path = "é".repeat(400);
    let sealed = Ticket { path, ..ticket() }.seal(&ring()).unwrap();
    assert!(sealed.ticket().path.len() <= PATH_BYTES_MAX);
    assert!(sealed.bytes().len() <= TICKET_BYTES_MAX);
}

#[test]
fn errors_of_a_file_name_the_problem_without_quoting_the_secret() {
    let text = ticket().seal(&ring()).unwrap().to_text();
    let secret = text.trim().rsplit(':').next().unwrap().to_owned();
    let ticket_part = text.split(':').nth(1).unwrap();
    let cases = [
        format!("ffticket1:{ticket_part}"),
        format!("ffticket2:{ticket_part}:{secret}"),
        format!("ffticket1:{}:{secret}", &ticket_part[..20]),
        format!("ffticket1:{ticket_part}zz:{secret}"),
        format!("ffticket1:{ticket_part}00:{secret}"),
        format!("ffticket1:{ticket_part}:abcd"),
    ];
    for case in cases {
        let error = SealedTicket::parse(Path::new("t"), case.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("`t`") && error.contains("credential issue"), "{error}");
        assert!(!error.contains(&secret), "{error}");
    }
}

#[test]
fn a_secret_is_not_printed() {
    let sealed = ticket().seal(&ring()).unwrap();
    let secret = sealed.to_text().trim().rsplit(':').next().unwrap().to_owned();
    assert!(!format!("{sealed:?}").contains(&secret));
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..1200)) {
        let _ = Ticket::decode(&bytes);
    }

    #[test]
    fn any_change_of_a_ticket_changes_its_secret(at in 0usize..60, change in 1u8..=255) {
        let sealed = ticket().seal(&ring()).unwrap();
        let mut bytes = sealed.bytes().to_vec();
        let at = at % bytes.len();
        bytes[at] ^= change;
        let other = secret(ring().signing().1, &bytes);
        prop_assert_ne!(other.bytes(), sealed.secret().bytes());
    }
}
