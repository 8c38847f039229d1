#!/bin/sh
# Hash the password of the secret, and become the broker.
set -eu
umask 077
printf 'devices:%s\n' "$(cat /run/secrets/mosquitto_password)" > /tmp/passwords
mosquitto_passwd -U /tmp/passwords
exec mosquitto -c /mosquitto/config/mosquitto.conf
