use super::*;

const FIRST: &str = "00112233445566778899aabbccddeeff";
const SECOND: &str = "ffeeddccbbaa99887766554433221100";

fn parse(content: &str) -> Result<KeyRing, AuthError> {
    KeyRing::parse(Path::new("ring"), content.as_bytes())
}

fn refusal(content: &str) -> String {
    parse(content).unwrap_err().to_string()
}

#[test]
fn a_bare_key_is_key_zero_and_a_ring_may_name_it() {
    let bare = parse(&format!(" {FIRST}\n")).unwrap();
    assert_eq!(bare.ids().collect::<Vec<_>>(), [0]);
    let ring = parse(&format!("7:{SECOND}\n0:{FIRST}\n")).unwrap();
    assert_eq!(ring.ids().collect::<Vec<_>>(), [7, 0]);
    assert_eq!(ring.signing().0, 7);
    assert_eq!(ring.get(0).unwrap().bytes(), bare.signing().1.bytes());
    assert!(ring.get(1).is_none());
}

#[test]
fn bytes_that_are_not_text_are_a_bare_key() {
    let content: Vec<u8> = (128..=255).chain(b"\n1".iter().copied()).chain(200..=250).collect();
    let ring = KeyRing::parse(Path::new("ring"), &content).unwrap();
    assert_eq!(ring.signing().1.bytes(), content);
}

#[test]
fn errors_of_a_key_ring_name_the_problem_without_quoting_keys() {
    let cases = [
        (format!("1:{FIRST}\n{SECOND}"), "line 2"),
        (format!("1:{FIRST}\n1:{SECOND}"), "id 1 is used twice"),
        (format!("1:{FIRST}\n2:{SECOND}\n3:{FIRST}"), "at most 2"),
        (format!("4294967296:{FIRST}"), "below 2^32"),
        (format!("1:{FIRST} {SECOND}"), "without blanks"),
        ("1:short".into(), "at least 16"),
        ("1:".into(), "at least 16"),
        (String::new(), "at least 16"),
        (format!("ffticket1:{FIRST}:{SECOND}"), "it holds a ticket"),
    ];
    for (content, expected) in cases {
        let error = refusal(&content);
        assert!(error.contains(expected) && error.contains("`ring`"), "{error}");
        assert!(!error.contains(FIRST) && !error.contains(SECOND), "{error}");
    }
}

#[test]
fn a_changed_file_is_reloaded_and_an_invalid_one_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, FIRST).unwrap();
    let keys = Keys::read(&path).unwrap();
    std::fs::write(&path, format!("0:{FIRST}\n1:{SECOND}\n")).unwrap();
    keys.read_now();
    assert_eq!(keys.current().ids().collect::<Vec<_>>(), [0, 1]);
    for content in ["1:short".to_owned(), "x".repeat(20_000)] {
        std::fs::write(&path, content).unwrap();
        keys.read_now();
        assert_eq!(keys.current().ids().collect::<Vec<_>>(), [0, 1]);
    }
    std::fs::remove_file(&path).unwrap();
    keys.read_now();
    assert_eq!(keys.current().ids().collect::<Vec<_>>(), [0, 1]);
    std::fs::write(&path, format!("1:{SECOND}")).unwrap();
    keys.read_now();
    assert_eq!(keys.current().ids().collect::<Vec<_>>(), [1]);
}

#[test]
fn keys_are_not_printed() {
    let text = format!("{:?} {:?}", parse(FIRST).unwrap(), Keys::from(parse(FIRST).unwrap()));
    assert_eq!(text, "KeyRing([0]) KeyRing([0])");
}
