"""The properties files of clouds are understood, and unusable lines are named without their values."""

from pathlib import Path

import pytest

from delivery import kafka_config
from delivery.kafka_config import CredentialsError

CONFLUENT = """
# Required connection configs for Kafka producer, consumer, and admin
bootstrap.servers=pkc-1.eu-west-1.aws.confluent.cloud:9092
security.protocol=SASL_SSL
sasl.mechanisms=PLAIN
sasl.username=KEY
sasl.password=s3cret

# Best practice for higher availability in librdkafka clients prior to 1.7
session.timeout.ms=45000
client.id=ccloud-python-client
"""

EVENT_HUBS = r"""
bootstrap.servers=fleet.servicebus.windows.net:9093
security.protocol: SASL_SSL
sasl.mechanism=PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
    username="$ConnectionString" \
    password="Endpoint=sb://fleet.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=a\"b=";
client.dns.lookup=use_all_dns_ips
"""

OAUTH = """
security.protocol=SASL_SSL
sasl.mechanism=OAUTHBEARER
sasl.login.callback.handler.class=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler
sasl.oauthbearer.token.endpoint.url=https://login.example/token
sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required \
  clientId='me' clientSecret='s3cret' scope='kafka';
"""

MSK = """
security.protocol=SASL_SSL
sasl.mechanism=AWS_MSK_IAM
sasl.jaas.config=software.amazon.msk.auth.iam.IAMLoginModule required;
sasl.client.callback.handler.class=software.amazon.msk.auth.iam.IAMClientCallbackHandler
"""

PEM_STORES = """
security.protocol=SSL
ssl.truststore.type=PEM
ssl.truststore.location=/etc/kafka/ca.pem
ssl.keystore.type=PEM
ssl.keystore.certificate.chain=-----BEGIN CERTIFICATE-----\\nMIIB\\n-----END CERTIFICATE-----
ssl.keystore.key=-----BEGIN PRIVATE KEY-----\\nMC4C\\n-----END PRIVATE KEY-----
"""


def test_the_file_of_confluent_cloud_is_understood() -> None:
    values, unused = kafka_config.parse(CONFLUENT)

    assert values == {
        "servers": "pkc-1.eu-west-1.aws.confluent.cloud:9092",
        "security": "sasl-ssl",
        "mechanism": "plain",
        "username": "KEY",
        "password": "s3cret",
        "client_id": "ccloud-python-client",
    }
    assert unused == ("line 10, session.timeout.ms",)


def test_a_login_module_of_java_is_understood_with_its_quotes_and_semicolons() -> None:
    values, unused = kafka_config.parse(EVENT_HUBS)

    assert values["username"] == "$ConnectionString"
    assert values["password"].endswith('servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=a"b=')
    assert unused == ("line 8, client.dns.lookup",)


@pytest.mark.parametrize(
    ("text", "password"),
    [
        (r'"a\\"b"', 'a"b'),  # Java unescapes twice: the line, and the quoted text in it
        (r'"a\"b"', 'a"b'),
        (r'"BnItZ2xG\="', "BnItZ2xG="),
        (r'"a\\\\b"', r"a\b"),
        ("'p;x=\"1\"'", 'p;x="1"'),
    ],
)
def test_a_password_of_a_login_module_is_read_as_java_reads_it(text: str, password: str) -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    values, unused = kafka_config.parse(f'sasl.jaas.config={module} username="me" password={text};')

    assert (values, unused) == ({"username": "me", "password": password}, ())


def test_a_login_module_with_an_open_quote_is_named_and_half_a_password_is_not_used() -> None:
    assert kafka_config.parse('sasl.jaas.config=a.PlainLoginModule required username="me" password="s3c ret;') == (
        {},
        ("line 1, sasl.jaas.config: not a login module with options such as username='me', and each quote closed",),
    )


def test_a_file_that_java_has_written_is_understood() -> None:
    text = r"""
bootstrap.servers=kafka-0.example\:9093,kafka-1.example\:9093
sasl.oauthbearer.token.endpoint.url=https\://login.example/token?a\=b
sasl.password=a\:b
"""

    assert kafka_config.parse(text).values == {
        "servers": "kafka-0.example:9093,kafka-1.example:9093",
        "token_endpoint": "https://login.example/token?a=b",
        "password": r"a\:b",
    }


def test_pem_over_several_lines_is_joined_with_its_line_breaks() -> None:
    text = """
ssl.truststore.certificates=-----BEGIN CERTIFICATE----- \\
  MIIB \\
  AA== \\
  -----END CERTIFICATE-----
"""

    assert kafka_config.parse(text).values == {
        "ca_pem": "-----BEGIN CERTIFICATE-----\nMIIB\nAA==\n-----END CERTIFICATE-----"
    }


def test_a_file_from_windows_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_bytes("\ufeffbootstrap.servers=kafka-0:9092\r\nsasl.password=a\u2028b\r\n".encode())

    assert kafka_config.read(file) == ({"servers": "kafka-0:9092", "password": "a\u2028b"}, ())


def test_client_credentials_are_understood() -> None:
    values, unused = kafka_config.parse(OAUTH)

    assert values["mechanism"] == "oauthbearer"
    assert "https://login.example/token" in values["token_endpoint"]
    assert (values["oauth_client_id"], values["oauth_client_secret"], values["oauth_scope"]) == (
        "me",
        "s3cret",
        "kafka",
    )
    assert unused == ()


def test_a_login_by_an_aws_role_is_understood() -> None:
    assert kafka_config.parse(MSK) == ({"security": "sasl-ssl", "mechanism": "aws-msk-iam"}, ())


def test_stores_in_pem_are_understood() -> None:
    values, unused = kafka_config.parse(PEM_STORES)

    assert values["ca"] == "/etc/kafka/ca.pem"
    assert values["cert_pem"] == "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
    assert unused == ()


def test_a_java_keystore_can_not_be_used_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    store = tmp_path / "truststore.jks"
    store.write_bytes(b"\xfe\xed\xfe\xed\x00\x00")
    values, unused = kafka_config.parse(f"ssl.truststore.location={store}")

    assert values == {}
    assert unused == (
        "line 1, ssl.truststore.location: no PEM file: give one with --kafka-ca, --kafka-cert and --kafka-key",
    )


@pytest.mark.parametrize(
    "line", ["ssl.endpoint.identification.algorithm=", "enable.ssl.certificate.verification=false"]
)
def test_nothing_turns_verification_off(line: str) -> None:
    values, (unused,) = kafka_config.parse(line)

    assert values == {}
    assert unused.endswith("brokers and their names are always verified")


def test_a_line_that_is_no_setting_is_named_by_its_number_only() -> None:
    assert kafka_config.parse("s3cret\nSecretKey==\n[default]\n! comment\n").unused == (
        "line 1: no setting",
        "line 2: no setting",
    )


@pytest.mark.parametrize("line", ["sasl.mechanism=GSSAPI", "security.protocol=TLS"])
def test_an_unsupported_setting_is_one_sentence_with_an_alternative(line: str) -> None:
    with pytest.raises(CredentialsError, match="can't be used here: use one of"):
        kafka_config.parse(line)


def test_brokers_may_be_written_with_their_protocol() -> None:
    assert kafka_config.parse("bootstrap.servers=SASL_SSL://a:9092, b:9093").values == {"servers": "a:9092,b:9093"}
    with pytest.raises(CredentialsError, match="'a' is not HOST:PORT"):
        kafka_config.parse("bootstrap.servers=a")


def test_no_secret_is_in_the_repr() -> None:
    assert "s3cret" not in repr(kafka_config.parse(CONFLUENT))


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"--kafka-config .*nowhere: No such file"):
        kafka_config.read(tmp_path / "nowhere")
    (tmp_path / "pem").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    with pytest.raises(CredentialsError, match="not a file of lines such as"):
        kafka_config.read(tmp_path / "pem")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CredentialsError, match="not a file of lines such as"):
        kafka_config.read(tmp_path / "binary")
